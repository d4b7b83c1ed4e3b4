"""Measures where the seconds and the bytes of a start went.

Knows no phase by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

GIB = 1 << 30
NAME_WIDTH = 28


class Startup:
    """Begins with its construction; phases are listed in the order in which they first ended."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """clock: monotonic seconds."""
        self._clock = clock
        self._begun = clock()
        self._seconds: dict[str, float] = {}
        self._bytes: dict[str, int] = {}
        self._remarks: dict[tuple[str, str], str] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs inside as `name`'s."""
        began = self._clock()
        yield
        self.spent(name, self._clock() - began)

    def spent(self, name: str, seconds: float, remark: str = "") -> None:
        """Adds to what `name` took so far."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        self._remarks[name, "s"] = remark

    def took(self, name: str, num_bytes: int, remark: str = "") -> None:
        """So many bytes of the device's memory are, or will be, `name`'s."""
        self._bytes[name] = num_bytes
        self._remarks[name, "GiB"] = remark

    @property
    def total_s(self) -> float:
        return self._clock() - self._begun

    def table(self) -> str:
        """Lines for a person: seconds by phase with what no phase claims, then GiB."""
        total = self.total_s
        other = total - sum(self._seconds.values())
        seconds = self._seconds | {"other": other, "total": total}
        lines = [self._line(name, f"{value:9.2f}", "s") for name, value in seconds.items()]
        for name, size in self._bytes.items():
            lines.append(self._line(name, f"{size / GIB:10.3f}", "GiB"))
        return "\n".join(lines)

    def _line(self, name: str, amount: str, unit: str) -> str:
        remark = self._remarks.get((name, unit), "")
        return f"  {name:<{NAME_WIDTH}}{f'{amount} {unit}':<15} {remark}".rstrip()
