"""Parses the tool calls of each model family; one file a family."""
