"""Keeps how far away the engines are that other cells lend, in a file that all processes of a home
map: the relay measures it, and workers read it when they predict.

The file has a double for each number of an engine: the seconds of a round trip.
"""

from __future__ import annotations

import socket
import struct
from pathlib import Path

from gateway.fleet.drain_marks import MAX_ENGINES
from gateway.fleet.shared_sums import map_file

NUM_BYTES = 8 * MAX_ENGINES
_MIN_RTT = struct.Struct("@148xI")
"""The least round trip of the last minutes, in microseconds, within `struct tcp_info` (linux/tcp.h:
`tcpi_min_rtt`). The smoothed one has the peer's delayed acknowledgements in it where a connection
is quiet."""


class RoundTrips:
    """The round trips of one home. Constructing it makes the file where there is none."""

    def __init__(self, path: Path) -> None:
        """Raises: OSError."""
        self._map = map_file(path, NUM_BYTES)
        self._seconds = memoryview(self._map).cast("d")

    def note(self, number: int, seconds: float) -> None:
        self._seconds[number] = seconds

    def of(self, number: int) -> float:
        """Return the seconds to an engine and back; 0: nobody has measured it."""
        return self._seconds[number]

    def close(self) -> None:
        self._seconds.release()
        self._map.close()


def round_trip_s(connection: socket.socket) -> float | None:
    """Return what the kernel has measured of a TCP connection; None: it does not say."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.size)
    if len(told) < _MIN_RTT.size:  # an old kernel
        return None
    (microseconds,) = _MIN_RTT.unpack(told)
    return microseconds / 1e6 if microseconds < 2**32 - 1 else None
