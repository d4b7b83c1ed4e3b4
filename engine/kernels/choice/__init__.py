"""Chooses among ways to compute the same by measuring them on this machine."""
