"""The HTTP form of every error: one table that turns exceptions into status, headers and body."""
