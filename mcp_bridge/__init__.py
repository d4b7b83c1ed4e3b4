"""Many MCP servers behind one door. Knows no billing, no gateway, no Litestar."""
