"""Fills in on the device the inputs of a step that the host does not know yet."""
