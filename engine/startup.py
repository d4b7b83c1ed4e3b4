"""Where the seconds and the bytes of a start went.

Above: whoever starts something (`__main__.py`, `core.py`, `weights/loader.py`) measures its part.
Below: nothing. Knows no phase by name.
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
        self._remarks: dict[str, str] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside is `name`'s."""
        began = self._clock()
        yield
        self.spent(name, self._clock() - began)

    def spent(self, name: str, seconds: float, remark: str = "") -> None:
        """Adds to what `name` took so far."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        self._remarks[name] = remark

    def took(self, name: str, num_bytes: int, remark: str = "") -> None:
        """So many bytes of the device's memory are, or will be, `name`'s."""
        self._bytes[name] = num_bytes
        self._remarks[name] = remark

    @property
    def total_s(self) -> float:
        return self._clock() - self._begun

    def table(self) -> str:
        """Lines for a person: seconds by phase with what no phase claims, then GiB."""
        total = self.total_s
        other = total - sum(self._seconds.values())
        lines = [self._line(name, f"{seconds:9.2f} s") for name, seconds in self._seconds.items()]
        lines += [self._line("other", f"{other:9.2f} s"), self._line("total", f"{total:9.2f} s")]
        lines += [self._line(name, f"{size / GIB:9.2f} GiB") for name, size in self._bytes.items()]
        return "\n".join(lines)

    def _line(self, name: str, amount: str) -> str:
        return f"  {name:<{NAME_WIDTH}}{amount:<14} {self._remarks.get(name, '')}".rstrip()
