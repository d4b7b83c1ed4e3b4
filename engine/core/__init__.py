"""Composes the engine: loads the model, sizes the KV cache and runs the scheduler's steps.

Knows no sockets.
"""
