"""Kernels for processors, compiled by numba: attention over the paged cache, linear products, and
what lies between them. Each `kernels/<op>.py` chooses; without numba its torch reference serves."""
