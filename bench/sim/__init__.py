"""The engine's own scheduler on virtual time: who waits how long, under loads that no test machine
could make, the same in every run.

Above: `python -m bench.sim`. Below: `engine.scheduling.scheduler` and all it stands on, as it is served; only
the model is left out, for a formula of what a step takes. Knows no sockets and, but for `fit.py`,
no tensors.
"""
