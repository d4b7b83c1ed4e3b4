"""Runs one generation from admission to settlement: the main path of every inference request."""
