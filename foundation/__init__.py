"""Parts that every room may use: tasks, periodic work, server-sent events, HTTP/1.1, structs.

It imports no room.
"""
