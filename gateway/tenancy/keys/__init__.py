"""API keys of a project: who owns them, what restricts them, how they change."""
