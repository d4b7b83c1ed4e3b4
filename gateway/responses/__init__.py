"""Keeps responses and conversations that outlive their requests: sealed in Postgres, for a time.
Knows no HTTP."""
