"""Holds the batch of one step, and its copies between the host and the device."""
