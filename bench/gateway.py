"""Requests per second and added latency of the gateway, in front of an upstream that costs nothing.

`python -m bench.gateway [--seconds S] [--dry]`: starts `bench.stub_upstream` and, in a home
of its own, `tollgate up` with one worker, everything on: keys, limits, spool, Postgres, Redis. The
same load then goes straight to the stub and through the gateway, in the same run. Where there are
two cores or more, stub and load generator get the last one and the gateway with its stores the
others.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvloop

from bench.load import Tally, Target, closed_loop, open_loop
from bench.ports import free_port
from bench.record import record

ROOT = Path(__file__).resolve().parents[1]
MODEL = "stub"
CONNECTIONS = 32
RATE_PER_S = 20.0
WARM_UP_S = 2.0
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
UNLIMITED = 1_000_000_000_000
CONFIG = """
[[model]]
name = "{model}"
upstream = "http://127.0.0.1:{port}/v1"

[plan.default]
tokens_per_minute = {limit}
requests_per_minute = {limit}
max_concurrent_streams = {limit}
"""


def share_cores() -> tuple[set[int], set[int]]:
    """(for the gateway, for the load): disjoint where possible."""
    cores = sorted(os.sched_getaffinity(0))
    return (set(cores[:-1]), {cores[-1]}) if len(cores) > 1 else (set(cores), set(cores))


@contextmanager
def process(command: list[str], log: Path, cores: set[int]) -> Iterator[subprocess.Popen[bytes]]:
    """Runs on `cores`, and so do its children; interrupted at the end."""
    with log.open("wb") as out:
        started = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
    os.sched_setaffinity(started.pid, cores)
    try:
        yield started
    finally:
        started.send_signal(signal.SIGINT)
        try:
            started.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def wait_until_ready(url: str, started: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if started.poll() is not None:
            break
        try:
            if httpx.get(url, timeout=2).status_code < 500:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise SystemExit(f"{url} is not ready:\n{log.read_text()[-4000:]}")


class Meter:
    """Processor time of the gateway's worker and of everything else that `tollgate up` runs."""

    def __init__(self, up: int) -> None:
        tree = psutil.Process(up).children(recursive=True)
        self._groups = {
            "worker": [child for child in tree if "worker" in child.cmdline()],
            "stores": [child for child in tree if "worker" not in child.cmdline()],
        }

    def cpu_s(self) -> dict[str, float]:
        return {
            group: sum(sum(child.cpu_times()[:2]) for child in members if child.is_running())
            for group, members in self._groups.items()
        }


async def measure(
    url: str, api_key: str | None, duration_s: float, meter: Meter | None = None
) -> dict[str, Any]:
    """Each kind of answer in each kind of loop."""
    result: dict[str, Any] = {}
    for kind, stream in (("whole", False), ("stream", True)):
        target = Target(url=url, model=MODEL, api_key=api_key, stream=stream)
        warm_up_s = min(WARM_UP_S, duration_s)
        await closed_loop(target, connections=CONNECTIONS, duration_s=warm_up_s)
        before = meter.cpu_s() if meter else {}
        closed = await closed_loop(target, connections=CONNECTIONS, duration_s=duration_s)
        after = meter.cpu_s() if meter else {}
        opened = await open_loop(target, rate_per_s=RATE_PER_S, duration_s=duration_s)
        result[kind] = {
            f"closed_c{CONNECTIONS}": checked(closed),
            f"open_{RATE_PER_S:.0f}_per_s": checked(opened),
        }
        if meter:
            thousands = len(closed.latencies_s) / 1000
            result[kind]["cpu_s_per_1000"] = {
                group: round((after[group] - before[group]) / thousands, 3) for group in after
            }
    return result


def checked(tally: Tally) -> dict[str, Any]:
    summary = tally.summary()
    if tally.num_errors:
        raise SystemExit(f"a measurement with errors is none: {summary}")
    return summary


def added_ms(straight: dict[str, Any], gateway: dict[str, Any]) -> dict[str, Any]:
    """Of the open loop: to the whole answer, and to the first byte of a stream."""
    loop = f"open_{RATE_PER_S:.0f}_per_s"
    return {
        kind: {
            percentile: round(
                gateway[kind][loop][what][percentile] - straight[kind][loop][what][percentile], 3
            )
            for percentile in ("p50", "p99")
        }
        for kind, what in (("whole", "latency_ms"), ("stream", "first_byte_ms"))
    }


def run(duration_s: float, folder: Path) -> dict[str, Any]:
    load_average = round(os.getloadavg()[0], 2)
    theirs, ours = share_cores()
    stub_port, port = free_port(), free_port()
    stub_url, url = f"http://127.0.0.1:{stub_port}/v1", f"http://127.0.0.1:{port}/v1"
    home, config = folder / "home", folder / "tollgate.toml"
    config.write_text(CONFIG.format(model=MODEL, port=stub_port, limit=UNLIMITED))
    stub_log, up_log = folder / "stub.log", folder / "up.log"
    stub_command = [sys.executable, "-m", "bench.stub_upstream", str(stub_port)]
    up_command = [str(Path(sys.executable).parent / "tollgate"), "up", "--home", str(home)]
    up_command += ["--port", str(port), "--config", str(config), "--workers", "1"]
    os.sched_setaffinity(0, ours)
    with (
        process(stub_command, stub_log, ours) as stub,
        process(up_command, up_log, theirs) as up,
    ):
        wait_until_ready(stub_url, stub, stub_log)
        wait_until_ready(f"http://127.0.0.1:{port}/health/ready", up, up_log)
        api_key = json.loads((home / "credentials.json").read_text())["api_key"]
        straight = uvloop.run(measure(stub_url, None, duration_s))
        through = uvloop.run(measure(url, api_key, duration_s, Meter(up.pid)))
    return {
        "cores": {"gateway": sorted(theirs), "load": sorted(ours)},
        "seconds_each": duration_s,
        "load_average_before": load_average,
        "straight": straight,
        "gateway": through,
        "added_ms": added_ms(straight, through),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--dry", action="store_true", help="print the result, record nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tg-bench-", dir="/tmp") as folder:
        result = run(options.seconds, Path(folder))
    print(json.dumps(result, indent=2))
    if not options.dry:
        print(record("gateway", result))


if __name__ == "__main__":
    main()
