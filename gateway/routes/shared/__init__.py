"""The code that all handlers share: access, bodies, replies, pages, errors and idempotency."""
