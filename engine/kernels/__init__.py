"""Computes on the device behind plain functions: every operation has a torch reference, and one
place that chooses what runs on which device. Knows no model.
"""
