"""Benchmarks: one command each, `python -m bench.NAME`; what they measured stands in results/."""

import engine  # noqa: F401  # before torch: what it sets counts here as it does where it serves
