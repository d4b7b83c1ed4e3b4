"""Sends events of an organization over HTTP to its endpoints: outbox, deliveries, retries,
signatures."""
