"""What an org approved of its MCP servers, its rules for calls, and calls that wait for a yes."""
