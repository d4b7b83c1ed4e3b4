"""Organisations, projects, keys and plans: tables and their few verbs."""
