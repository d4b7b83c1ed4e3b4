"""Replicas: in-repo engines and OpenAI-compatible upstreams behind one protocol, and the router over them."""
