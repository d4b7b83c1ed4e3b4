"""The handlers that report usage, the prompt cache and the health of a worker."""
