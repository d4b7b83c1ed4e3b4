"""Backs an installation up into a folder of encrypted chunks, verifies it, and restores it"""
