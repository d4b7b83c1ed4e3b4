"""Serves the engine on a socket and lets a gateway talk to it. Knows no torch."""
