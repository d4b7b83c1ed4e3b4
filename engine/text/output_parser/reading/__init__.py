"""Reads a model's text piece by piece into deltas, whatever the family's call format."""
