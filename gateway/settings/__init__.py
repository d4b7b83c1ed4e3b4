"""Reads tollgate.toml, TOLLGATE_* variables and flags into frozen settings, and edits the file."""
