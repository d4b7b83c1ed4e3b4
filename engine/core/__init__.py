"""The engine core: loads the model, sizes the KV cache, and runs the scheduler's steps on the runner.

Knows no sockets.
"""
