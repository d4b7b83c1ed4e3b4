"""Commands about who may call: organizations, projects, users and keys."""
