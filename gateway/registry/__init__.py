"""Keeps the versions of models by digest, and who is pinned to which."""
