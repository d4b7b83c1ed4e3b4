"""Decides how many engines each model wants, from what is asked of it and what its engines say."""
