"""Parts that every room may use: tasks, periodic work, server-sent events. It imports no room."""
