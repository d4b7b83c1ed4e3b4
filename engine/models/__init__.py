"""Defines the model families: one file each, which reads its config.json; `decoder.py` is what
the decoders share.
Knows no files and no requests.
"""
