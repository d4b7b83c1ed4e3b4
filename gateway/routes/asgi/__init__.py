"""asgi."""
