"""text_safety."""
