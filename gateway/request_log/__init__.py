"""Keeps what became of each request: a row of it for some days, and sums by hour and by day."""
