"""The HTTP face: who are you, may you, what did you ask, here it is."""
