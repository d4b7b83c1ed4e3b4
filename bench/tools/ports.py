"""A port for a server that a benchmark or a test is about to start. Knows nothing of the server."""

from __future__ import annotations

import socket


def free_port() -> int:
    """One of the loopback interface that nobody holds at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
