"""Follows the prefix caches of all engines of a home, in a process of its own."""
