"""Counts what an installation does while nobody asks it for anything."""
