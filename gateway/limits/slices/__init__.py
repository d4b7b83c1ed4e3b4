"""Keeps slices of limits in a worker, so that most requests are admitted and settled without a trip
to Redis (README.md)."""
