"""Replicas: our engines and OpenAI-compatible upstreams behind one protocol, and their router."""
