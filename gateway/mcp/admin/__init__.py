"""Shows people what MCP servers offer and hold, and takes their decisions."""
