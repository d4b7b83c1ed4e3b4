"""Writes the grammars that outputs with tool calls must match."""
