"""Validates values by JSON Schema and messages by the protocol, in bounded time."""
