"""The handlers of the admin API for what the whole installation shares: models, plans and keys."""
