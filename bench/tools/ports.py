"""A port for a server that a benchmark or a test is about to start. Knows nothing of the server."""

from __future__ import annotations

import itertools
import random
import socket
from collections.abc import Iterator
from contextlib import suppress

FIRST, END = 16_000, 32_000
"""Below those that Linux gives to whoever names none (32768 and up): nobody takes one by chance
before its server does."""
START = random.SystemRandom().randrange(FIRST, END)
"""Another one in each process, so that two are not given the same."""
PORTS: Iterator[int] = itertools.cycle((*range(START, END), *range(FIRST, START)))


def free_port() -> int:
    """One of the loopback interface that nobody holds at the moment."""
    while True:
        port = next(PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
