"""Stores the files of tenants: uploaded for batches and other work, or written by them."""
