"""An upstream and a load generator in C, where a folder has their sources (`stub.c`, `lg.c`): both
cost so little that they share a core with the stores and still are never what limits.

Without a kit, `bench.tools.stub_upstream` and `bench.tools.load` do the same.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import uvloop

from bench.tools.load import Target, closed_loop, open_loop
from bench.tools.stub_upstream import NUM_CHUNKS

DRAIN_S = 30.0
OPEN_CONNECTIONS = 16


class Load(Protocol):
    """Each answers with what `bench.tools.load.Tally.summary` says."""

    def closed(self, target: Target, connections: int, duration_s: float) -> dict[str, Any]: ...

    def opened(self, target: Target, rate_per_s: float, duration_s: float) -> dict[str, Any]: ...


class OwnLoad:
    """`bench.tools.load`, in this process."""

    def closed(self, target: Target, connections: int, duration_s: float) -> dict[str, Any]:
        loop = closed_loop(target, connections=connections, duration_s=duration_s)
        return uvloop.run(loop).summary()

    def opened(self, target: Target, rate_per_s: float, duration_s: float) -> dict[str, Any]:
        loop = open_loop(target, rate_per_s=rate_per_s, duration_s=duration_s)
        return uvloop.run(loop).summary()


class Kit:
    """Built from the sources in `sources`, into `folder`."""

    def __init__(self, sources: Path, folder: Path) -> None:
        self._folder = folder
        for name in ("stub", "lg"):
            command = ["cc", "-O2", "-o", str(folder / name), str(sources / f"{name}.c")]
            subprocess.run(command, check=True)

    def stub_command(self, port: int, gap_ms: float) -> list[str]:
        gap_us = str(round(1000 * gap_ms))
        return [str(self._folder / "stub"), str(port), gap_us, str(NUM_CHUNKS)]

    def closed(self, target: Target, connections: int, duration_s: float) -> dict[str, Any]:
        return self._ask(target, connections, duration_s)

    def opened(self, target: Target, rate_per_s: float, duration_s: float) -> dict[str, Any]:
        return self._ask(target, OPEN_CONNECTIONS, duration_s, "-r", str(rate_per_s))

    def _ask(
        self, target: Target, connections: int, duration_s: float, *options: str
    ) -> dict[str, Any]:
        parts = urlsplit(target.url)
        body, headers = self._folder / "body.json", self._folder / "headers.txt"
        body.write_bytes(target.body())
        sent = [("Authorization", f"Bearer {target.api_key or 'none'}"), *target.headers]
        headers.write_text("".join(f"{name}: {value}\n" for name, value in sent))
        path = f"{parts.path}/chat/completions"
        command = [str(self._folder / "lg"), str(parts.port), path, str(connections)]
        command += [str(duration_s), str(body), "-w", "0", "-H", f"@{headers}"]
        command += [*options, *(["-s"] if target.stream else [])]
        done = subprocess.run(
            command, capture_output=True, check=True, timeout=duration_s + DRAIN_S
        )
        return to_summary(json.loads(done.stdout))


def to_summary(said: Mapping[str, Any]) -> dict[str, Any]:
    """Summarize what `lg` printed. A whole answer's first byte comes with its last."""
    return {
        "requests": said["ok"],
        "errors": said["errs"] + said["non200"],
        "requests_per_s": said["rps"],
        "events_per_s": said.get("events_per_s", 0.0),
        "latency_ms": only_percentiles(said["lat_ms"], ("p50", "p99", "max")),
        "first_byte_ms": only_percentiles(said.get("ttft_ms", said["lat_ms"])),
    }


def only_percentiles(
    found: Mapping[str, float], wanted: Sequence[str] = ("p50", "p99")
) -> dict[str, float]:
    return {name: found[name] for name in wanted}
