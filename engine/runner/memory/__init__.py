"""Measures and allocates memory: what is free, what a step needs, the KV cache."""
