"""Holds the kernels for processors, compiled by numba: attention over the paged cache, linear
products, and what lies between them. Each `kernels/<op>/dispatch.py` chooses;
without numba its torch reference serves."""
