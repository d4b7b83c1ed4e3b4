"""MCP servers that are processes of this machine, started and ended here."""
