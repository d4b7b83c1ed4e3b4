"""Serves any OpenAPI document as tools, and a call of one as an HTTP request."""
