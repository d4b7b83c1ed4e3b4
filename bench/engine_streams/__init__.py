"""Measures an engine of ours behind gateway and socket."""
