"""Loads checkpoint folders on disk into models in memory: safetensors, the registry of families.
Knows no requests.
"""
