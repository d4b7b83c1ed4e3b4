"""What a caller sees of its own use: cost, tags, cache report and its own view."""
