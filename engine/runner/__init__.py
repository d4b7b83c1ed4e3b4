"""Runs one step on the device: the batch's tensors, the model, the next tokens. Knows no
queue and no budget.
"""
