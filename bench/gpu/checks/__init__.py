"""Checks on a GPU that each kernel and the engine compute what they should."""
