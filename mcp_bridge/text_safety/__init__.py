"""Finds text that misleads people or models: hidden characters, look-alikes, instructions."""
