"""What the gateway costs in front of an upstream that costs nothing, beside the least possible.

`python -m bench.gateway [--seconds S] [--workers N] [--dry]`: starts `bench.stub_upstream`, the two
passthroughs of `bench.floor` (bare ASGI, and a bare Litestar route: the same server, loop and HTTP
client, and nothing else) and, in a home of its own, `tollgate up`, everything on: keys, limits,
spool, Postgres, Redis. The same load goes straight to the stub and through each, in the same run;
one table shows them with ratios to the bare passthrough. Where there are two cores or more, stub,
load generator and stores get the last one and what is measured the others.

Processor time is that of the process which serves, whatever else ran on the machine meanwhile; it
is the figure to compare. Rates and latencies are only as good as the machine was quiet.
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

from bench.floor import PATH
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
SIDES = {
    "straight": "the stub itself",
    "bare": "bare ASGI",
    "litestar": "bare Litestar",
    "gateway": "gateway",
}
COLUMNS = (
    *("req/s", "CPU ms/req", "events/s", "CPU ms/stream"),
    *("added p50 ms", "added p99 ms", "added TTFT ms", "memory MB"),
)
""""Added": to the stub's own answer, at RATE_PER_S requests a second."""
CONFIG = """
[[model]]
name = "{model}"
upstream = "{url}"

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
    """Processor time and memory of who serves, and the time of the stores behind it."""

    def __init__(self, root: int) -> None:
        tree = psutil.Process(root).children(recursive=True)
        workers = [child for child in tree if "worker" in child.cmdline()]
        self._serving = workers or [psutil.Process(root)]
        self._stores = [child for child in tree if child not in workers] if workers else []

    def move_stores(self, cores: set[int]) -> None:
        """What they start from now on runs there too."""
        for each in self._stores:
            each.cpu_affinity(sorted(cores))

    def cpu_s(self) -> dict[str, float]:
        groups = {"serving": self._serving, "stores": self._stores}
        return {
            name: sum(sum(each.cpu_times()[:2]) for each in group if each.is_running())
            for name, group in groups.items()
        }

    def memory_mb(self) -> float:
        """Of each process that serves."""
        sizes = [each.memory_info().rss for each in self._serving]
        return round(sum(sizes) / len(sizes) / 1e6, 1)


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
            "cpu_ms": {
                group: round(1000 * (after[group] - before[group]) / len(closed.latencies_s), 4)
                for group in after
            },
        }
    if meter:
        result["memory_mb"] = meter.memory_mb()
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


def figures(side: dict[str, Any], straight: dict[str, Any]) -> list[float]:
    """As `COLUMNS` names them."""
    closed, added = f"closed_c{CONNECTIONS}", added_ms(straight, side)
    return [
        side["whole"][closed]["requests_per_s"],
        side["whole"]["cpu_ms"].get("serving", 0.0),
        side["stream"][closed]["events_per_s"],
        side["stream"]["cpu_ms"].get("serving", 0.0),
        added["whole"]["p50"],
        added["whole"]["p99"],
        added["stream"]["p50"],
        side.get("memory_mb", 0.0),
    ]


def table(result: dict[str, Any]) -> str:
    """A line for each side, and below it how many times the bare passthrough's figures its are."""
    floor = figures(result["bare"], result["straight"])
    lines = ["".join([f"{'':16}", *(f"{name:>14}" for name in COLUMNS)])]
    for name, title in SIDES.items():
        mine = figures(result[name], result["straight"])
        lines.append("".join([f"{title:16}", *(f"{each:14,.3f}" for each in mine)]))
        if name not in ("straight", "bare"):
            ratios = [
                f"{a / b:13.2f}x" if b else f"{'':14}" for a, b in zip(mine, floor, strict=True)
            ]
            lines.append("".join([f"{'':16}", *ratios]))
    return "\n".join(lines)


def run(duration_s: float, workers: int, folder: Path) -> dict[str, Any]:
    load_average = round(os.getloadavg()[0], 2)
    theirs, ours = share_cores()
    stub_url, home = f"http://127.0.0.1:{free_port()}/v1", folder / "home"
    config = folder / "tollgate.toml"
    config.write_text(CONFIG.format(model=MODEL, url=stub_url, limit=UNLIMITED))
    ports = {name: free_port() for name in ("bare", "litestar", "gateway")}
    python = [sys.executable, "-m"]
    floor = [*python, "bench.floor"]
    commands = {
        "bare": [*floor, str(ports["bare"]), stub_url],
        "litestar": [*floor, str(ports["litestar"]), stub_url, "--litestar"],
        "gateway": [str(Path(sys.executable).parent / "tollgate"), "up", "--home", str(home)]
        + ["--port", str(ports["gateway"]), "--config", str(config), "--workers", str(workers)],
    }
    os.sched_setaffinity(0, ours)
    result: dict[str, Any] = {
        "cores": {"served": sorted(theirs), "load": sorted(ours)},
        "workers": workers,
        "seconds_each": duration_s,
        "load_average_before": load_average,
    }
    stub_command = [*python, "bench.stub_upstream", stub_url.rpartition(":")[2].split("/")[0]]
    with process(stub_command, folder / "stub.log", ours) as stub:
        wait_until_ready(stub_url, stub, folder / "stub.log")
        result["straight"] = uvloop.run(measure(stub_url, None, duration_s))
        for name, command in commands.items():
            log, url = folder / f"{name}.log", f"http://127.0.0.1:{ports[name]}"
            with process(command, log, theirs) as started:
                ready = "/health/ready" if name == "gateway" else PATH
                wait_until_ready(url + ready, started, log)
                key = api_key(home) if name == "gateway" else None
                meter = Meter(started.pid)
                meter.move_stores(ours)
                result[name] = uvloop.run(measure(f"{url}/v1", key, duration_s, meter))
    result["added_ms"] = added_ms(result["straight"], result["gateway"])
    return result


def api_key(home: Path) -> str:
    return str(json.loads((home / "credentials.json").read_text())["api_key"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--workers", type=int, default=1, help="of the gateway")
    parser.add_argument("--dry", action="store_true", help="print the result, record nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tg-bench-", dir="/tmp") as folder:
        result = run(options.seconds, options.workers, Path(folder))
    print(table(result))
    print(json.dumps(result))
    if not options.dry:
        print(record("gateway", result))


if __name__ == "__main__":
    main()
