"""Lets our own models write what MCP servers sample and embed what tools mean."""
