"""The handlers of the MCP endpoint and of its administration."""
