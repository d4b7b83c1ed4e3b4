"""organization."""
