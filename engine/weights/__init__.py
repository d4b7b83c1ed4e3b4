"""Checkpoint folders on disk to models in memory: safetensors, the registry of families, loading.
Knows no requests.
"""
