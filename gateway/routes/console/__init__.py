"""Serves the pages of the console, one module each, with the rights of whoever is signed in."""
