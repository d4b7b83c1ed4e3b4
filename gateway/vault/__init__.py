"""Keeps the credentials that upstreams of the MCP bridge want, of tenants and of their users."""
