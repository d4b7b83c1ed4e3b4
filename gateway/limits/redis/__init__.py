"""Runs the limiter's scripts in Redis, and bridges its outages and losses of data."""
