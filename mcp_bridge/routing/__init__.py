"""Finds the servers that a request is for, and runs it there until its result."""
