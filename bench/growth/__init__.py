"""Measures what a request costs in an installation that has grown (`python -m bench.growth`)."""
