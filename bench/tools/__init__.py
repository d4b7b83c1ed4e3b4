"""Holds what several benchmarks share: load generators, stubs of upstreams, records of results."""
