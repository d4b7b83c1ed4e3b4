"""Decoder models: one file a family, which reads its config.json; `decoder.py` is what they share.
Knows no files and no requests.
"""
