"""Measures what the metrics cost: a scrape, and what a request counts."""
