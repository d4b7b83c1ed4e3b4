"""The people of an organization: users, members of projects, invites."""
