"""One MCP server as a tenant reaches it: its configuration, health, credentials, and the transport
to it."""
