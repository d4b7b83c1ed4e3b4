"""Compiles grammars and keeps choices to them by token masks."""
