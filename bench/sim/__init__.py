"""The engine's own scheduler on virtual time: who waits how long, under loads that no test machine
could make, the same in every run.

Knows no sockets and, but for `fit.py`, no tensors.
"""
