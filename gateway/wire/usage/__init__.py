"""Shows a caller its own use: cost, tags, cache report and its own view."""
