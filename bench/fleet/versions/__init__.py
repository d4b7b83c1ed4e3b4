"""Measures what becomes of versions of a model."""
