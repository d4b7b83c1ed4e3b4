"""Commands about MCP servers: what they offer, what is approved of it, and calls of their tools."""
