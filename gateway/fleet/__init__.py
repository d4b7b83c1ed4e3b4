"""Routes to replicas: our engines and OpenAI-compatible upstreams behind one protocol."""
