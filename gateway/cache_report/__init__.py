"""Explains why prompts were served from the cache or not, and records cache leases."""
