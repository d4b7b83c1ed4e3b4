"""The MCP bridge: puts many MCP servers behind one endpoint.

Knows no billing, no gateway, no Litestar.
"""
