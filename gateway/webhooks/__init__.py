"""Webhooks: who is told of events over HTTP, and what became of it."""
