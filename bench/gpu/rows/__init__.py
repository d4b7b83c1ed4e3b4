"""Measures the rows of the GPU page: kernels, engine, start, and peers beside them."""
