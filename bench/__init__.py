"""Benchmarks: one command each, `python -m bench.NAME`; what they measured stands in results/."""
