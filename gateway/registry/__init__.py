"""Keeps the versions of models by digest, who is pinned to which, and rollouts of them."""
