"""The transports to a server over HTTP, the shared channels, and the choice between all
transports."""
