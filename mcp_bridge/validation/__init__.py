"""Validates arguments and results against JSON Schema in bounded time."""
