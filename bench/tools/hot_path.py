"""Show where the processor time of a whole answer goes: `python -m bench.gateway --profile`.

Under the load of the benchmark, the samples of each part share out the processor time that the
worker took for a request; beside them stands what the passthroughs take, which is the least that
this server and that framework could.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TIMEOUT_S = 10.0
POLL_S = 0.02


class Sampled:
    """A started `bench.tools.sampled`, which writes to `file`."""

    def __init__(self, process: subprocess.Popen[bytes], file: Path) -> None:
        self._process, self._file = process, file

    def begin(self) -> None:
        os.kill(self._process.pid, signal.SIGUSR1)

    def end(self) -> dict[str, Any]:
        """Return what was seen since `begin`. Raises: TimeoutError."""
        os.kill(self._process.pid, signal.SIGUSR2)
        deadline = time.monotonic() + TIMEOUT_S
        while not self._file.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {self._file}")
            time.sleep(POLL_S)
        found: dict[str, Any] = json.loads(self._file.read_text())
        return found


def by_part(found: Mapping[str, Any], num_requests: int) -> dict[str, float]:
    """Microseconds of a request, the most first."""
    samples: dict[str, int] = found["samples"]
    us_each = 1e6 * found["cpu_s"] / num_requests / sum(samples.values())
    parts = sorted(samples.items(), key=lambda each: -each[1])
    return {part: round(us_each * count, 1) for part, count in parts}


def table(parts: Mapping[str, float], floors: Mapping[str, float]) -> str:
    """`floors`: microseconds of a request on each passthrough, whole."""
    total = sum(parts.values())
    lines = [f"{'of a whole answer':38}{'us':>8}{'share':>8}"]
    lines += [f"{part:38}{us:8.0f}{us / total:8.0%}" for part, us in parts.items()]
    lines.append(f"{'together':38}{total:8.0f}")
    lines += [f"{f'{name}, together':38}{us:8.0f}" for name, us in floors.items()]
    return "\n".join(lines)
