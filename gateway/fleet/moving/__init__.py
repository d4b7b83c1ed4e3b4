"""Moves requests that wait at one engine, and of which nothing has run, to another one."""
