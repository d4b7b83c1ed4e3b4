"""The network: the listening socket, addresses of clients, and guarded outgoing connections."""
