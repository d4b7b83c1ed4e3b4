"""The transports to a server over HTTP, the shared channels, and the factory of all transports."""
