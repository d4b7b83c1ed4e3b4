"""Computes attention over the paged KV cache."""
