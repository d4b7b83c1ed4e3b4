"""Runs batches: many requests in a file, answered within a day at the price of batches."""
