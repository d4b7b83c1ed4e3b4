"""Says which modules cannot be imported here, because they need an extra that is not installed."""

from importlib.util import find_spec

OF_RAY = ("gateway.processes.launching.process", "gateway.processes.launching.ray_launcher")
"""Only the process of the Ray launcher imports these."""


def lacks_extra(module: str) -> bool:
    return module in OF_RAY and find_spec("ray") is None
