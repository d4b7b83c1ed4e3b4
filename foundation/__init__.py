"""Parts that every room may use: tasks, periodic work, errors, events, HTTP/1.1, structs.

It imports no room.
"""
