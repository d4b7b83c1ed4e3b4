"""Who are you: bearer credentials to a `Principal`."""
