"""Makes an OpenAI-compatible upstream a replica, metered and bounded."""
