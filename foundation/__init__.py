"""Small parts that every room may use: tasks and periodic work. It imports no room."""
