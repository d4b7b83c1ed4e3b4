"""Moves requests to another engine of their model, off one that is late or to be taken away."""
