"""Draws tokens from logits on the device."""
