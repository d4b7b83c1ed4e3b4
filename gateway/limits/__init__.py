"""Reserves from all limits of a request in one Lua script, or from none, and settles in another.

Knows no Litestar.
"""
