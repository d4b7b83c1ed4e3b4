"""Lets engines of other machines join a home, in a process of its own."""
