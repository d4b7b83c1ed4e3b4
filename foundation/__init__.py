"""Parts that every room may use: tasks, periodic work, server-sent events, derived structs.

It imports no room.
"""
