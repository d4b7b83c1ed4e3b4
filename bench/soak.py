"""Twenty minutes at 80 % of what this machine does, once it is warm: does anything grow, is
anything left behind?

`python -m bench.soak [--minutes M] [--dry]` (`make soak ARGS="--minutes 2"`): starts
`bench.tools.stub_upstream` and, in a home of its own, `tollgate up` with penny, the stub and one
worker; measures for some seconds how much of `soak_load`'s mix it does, and asks for 80 % of that
from then on, beside slow readers and keys that come and go. Every 30 seconds it prints what each
process holds. It exits with 1 if, after the warm-up, a process of ours or Redis grew by 2 % or more
(and by more than a MiB), if an answer was wrong, or if anything is held once the load has ended: a
lease, a call, a task, a client's socket, a file, a block of the KV cache. Of Postgres, whose shared
buffers fill with what it is given, the private memory is shown and not judged. Redis remembers each
settled lease for a quarter of an hour, and forgets somewhat late, so it is judged from then on, and
in a shorter run not at all. A worker compares the books once a day, first within a quarter of an
hour after its start, and keeps as heap what that took: it is judged from then on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import redis
import sqlalchemy as sa
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from bench.gateway import process, wait_until_ready
from bench.tools.load import percentiles_ms
from bench.tools.ports import free_port
from bench.tools.record import record
from bench.tools.soak_load import (
    MAX_OPEN,
    PENNY,
    SLOW_READERS,
    STUB,
    Load,
    change_keys,
    kinds,
    read_slowly,
)
from gateway.db import create_engine
from gateway.home import Home
from gateway.processes import embedded_databases as embedded

ROOT = Path(__file__).resolve().parents[1]
CONNECTIONS = 16
MEASURE_S = 10.0
SHARE = 0.8
WORKER, REDIS, POSTGRES = "worker", "redis", "postgres (private)"
FORGETS_AFTER_S = 900.0 * 1.25
"""SETTLED_TTL_MS in `gateway/limits/ledger.lua`, and until a tenth of what is there has expired,
which Redis does not hurry to remove (`active-expire-effort`)."""
SAMPLE_S, PRINT_S = 5.0, 30.0
WARM_UP = 0.2
"""The share of the time that warms up; memory at its end is the baseline."""
WINDOW = 0.1
"""The share of the time over which a median is taken."""
MAX_GROWTH, MAX_GROWTH_BYTES = 0.02, 1024 * 1024
QUIET_TIMEOUT_S = 60.0
IDLE_S = 6.0
"""Until pools have let go of what nobody uses."""
FILES_SLACK = 8
"""Connections that a pool opens when it has more to do than before."""
CONFIG = f"""
[[model]]
name = "{PENNY}"
path = "models/penny"
[[model]]
name = "{STUB}"
upstream = "http://127.0.0.1:STUB_PORT/v1"
[plan.default]
tokens_per_minute = 1_000_000_000
requests_per_minute = 10_000_000
max_concurrent_streams = 10_000
[plan.little]
requests_per_minute = 60
[engine]
num_blocks = 1024
"""
"""The KV cache is small enough to be full after the warm-up: its memory is the system's until a
block is used for the first time, and that is no growth."""


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float
    memory: dict[str, int]
    """By process name, in bytes."""


class Tree:
    """The processes of one `tollgate up`, by what they do."""

    def __init__(self, up: int, home: Path, port: int, stub_port: int) -> None:
        self.home, self.port, self.stub_port = Home(home), port, stub_port
        self.root = psutil.Process(up)

    def named(self) -> dict[str, psutil.Process]:
        found = {"supervisor": self.root}
        for child in self.root.children(recursive=True):
            try:
                line = child.cmdline() or [""]  # nothing is left of one that has ended
            except psutil.NoSuchProcess:
                continue
            if "worker" in line:
                found[WORKER] = child
            elif "engine" in line and "-m" in line:
                found["engine"] = child
            elif "valkey" in line[0] or "redis" in line[0]:
                found[REDIS] = child
        return found

    def memory(self) -> dict[str, int]:
        named = self.named()
        found = {name: each.memory_info().rss for name, each in named.items()}
        found[POSTGRES] = sum(
            child.memory_full_info().uss
            for child in self.root.children(recursive=True)
            if child not in named.values() and "postgres" in child.name()
        )
        return found

    def held(self) -> dict[str, int]:
        """Count what must be none, or no more than before, when nobody asks for anything."""
        worker = self.named()[WORKER]
        sockets = worker.net_connections("tcp")
        open_sockets = [each for each in sockets if each.status == psutil.CONN_ESTABLISHED]
        to_upstream = [s for s in open_sockets if s.raddr and s.raddr.port == self.stub_port]
        found = {
            "clients' sockets": sum(each.laddr.port == self.port for each in open_sockets),
            "worker's files": worker.num_fds() - len(to_upstream),
            "engine's files": self.named()["engine"].num_fds(),
            "leases": self.leases(),
        }
        text = httpx.get(f"http://127.0.0.1:{self.port}/metrics", timeout=10).text
        families = text_string_to_metric_families(text)
        values = {s.name: s.value for family in families for s in family.samples}
        for what, name in (
            ("calls", "tollgate_open_calls"),
            ("tasks", "tollgate_tasks"),
            ("running", "tollgate_num_requests_running"),
            ("waiting", "tollgate_num_requests_waiting"),
            ("events to ship", "tollgate_spool_backlog_events"),
        ):
            found[what] = int(values[name])
        blocks = values["tollgate_kv_cache_usage_perc"] * values["tollgate_kv_cache_blocks"]
        found["KV blocks"] = round(blocks)
        return found

    def leases(self) -> int:
        with redis.Redis.from_url(embedded.redis_url(self.home)) as store:
            return sum(store.zcard(key) for key in store.scan_iter("tollgate:{*}:leases"))


def left_behind(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Name what is held though nobody asks. `before`: idle, after a first load."""
    may_stay = {
        "worker's files": before["worker's files"] + FILES_SLACK,
        "engine's files": before["engine's files"],
        "tasks": before["tasks"],
    }
    return [
        f"{name}: {count}, at most {may_stay.get(name, 0)}"
        for name, count in after.items()
        if count > may_stay.get(name, 0)
    ]


@dataclass(frozen=True, slots=True)
class Span:
    """The lengths of a soak, in seconds."""

    total_s: float
    compared_s: float = 0.0
    """When the worker had compared the books of the day."""

    def warm_at_s(self, name: str) -> float:
        """From when on a process has all that it needs."""
        own_s = {REDIS: FORGETS_AFTER_S, WORKER: self.compared_s}.get(name, 0.0)
        return max(WARM_UP * self.total_s, own_s)


def growth(samples: list[Sample], span: Span) -> dict[str, tuple[int, int]]:
    """By process: bytes after the warm-up, and at the end."""
    window_s = max(WINDOW * span.total_s, SAMPLE_S)
    last_s = samples[-1].at_s - window_s

    def median(start_s: float, name: str) -> int:
        values = [s.memory[name] for s in samples if start_s <= s.at_s <= start_s + window_s]
        return int(statistics.median(values))

    return {
        name: (median(min(span.warm_at_s(name), last_s), name), median(last_s, name))
        for name in samples[-1].memory
    }


def grown(found: dict[str, tuple[int, int]], span: Span) -> list[str]:
    judged = {
        name: sizes
        for name, sizes in found.items()
        if name != POSTGRES and span.warm_at_s(name) < (1 - 2 * WINDOW) * span.total_s
    }
    return [
        f"{name} grew by {100 * (after / before - 1):.1f} %"
        for name, (before, after) in judged.items()
        if after - before > max(MAX_GROWTH * before, MAX_GROWTH_BYTES)
    ]


async def compared_s(tree: Tree, began_at: float) -> float:
    """When the day's comparison of the books had ended, in seconds after `began_at` (Unix); 0 where
    it has not."""
    db = create_engine(embedded.postgres_url(tree.home), pool_size=1)
    try:
        async with db.connect() as connection:
            ended = sa.text("SELECT extract(epoch FROM max(ended_at)) FROM reconciliations")
            ended_at = await connection.scalar(ended)
    finally:
        await db.dispose()
    return 0.0 if ended_at is None else max(0.0, float(ended_at) - began_at)


async def until_quiet(tree: Tree, before: dict[str, int] | None = None) -> dict[str, int]:
    """Wait until nothing is held though nobody asks any more, and return what is held then; when
    the time is over, return it as it is."""
    await asyncio.sleep(IDLE_S)
    deadline = time.monotonic() + QUIET_TIMEOUT_S
    while True:
        held = await asyncio.to_thread(tree.held)
        wanted = held if before is None else before
        if not left_behind(wanted, held) or time.monotonic() > deadline:
            return held
        await asyncio.sleep(1.0)


async def watch(tree: Tree, samples: list[Sample], load: Load) -> None:
    """Until cancelled."""
    began, next_line = time.monotonic(), 0.0
    while True:
        at_s = time.monotonic() - began
        samples.append(Sample(at_s, await asyncio.to_thread(tree.memory)))
        if at_s >= next_line:
            next_line += PRINT_S
            held = await asyncio.to_thread(tree.held)
            sizes = ", ".join(f"{k} {v / 2**20:.1f}" for k, v in samples[-1].memory.items())
            rest = ", ".join(f"{value} {name}" for name, value in held.items())
            print(f"{at_s:6.0f} s  MiB: {sizes}; {rest}; wrong: {load.outcome.wrong.total()}")
            sys.stdout.flush()
        await asyncio.sleep(SAMPLE_S)


async def soak(tree: Tree, load: Load, credentials: dict[str, str], total_s: float) -> Any:
    """The result, and what is wrong with it."""
    origin = f"http://127.0.0.1:{tree.port}"
    await load.closed(connections=MAX_OPEN, duration_s=MEASURE_S / 2)
    measured = await load.closed(connections=CONNECTIONS, duration_s=MEASURE_S)
    load.close()
    before = await until_quiet(tree)
    rate = SHARE * measured
    print(f"{measured:.0f} requests/s in a closed loop, {rate:.0f} from now on; idle: {before}")
    load.outcome.latencies_s.clear()
    began_at = time.time()
    samples: list[Sample] = []
    beside = [asyncio.create_task(watch(tree, samples, load))]
    beside += [
        asyncio.create_task(read_slowly(credentials["base_url"], credentials["api_key"]))
        for _ in range(SLOW_READERS)
    ]
    beside.append(asyncio.create_task(change_keys(origin, credentials["admin_key"], load.outcome)))
    await load.open(rate_per_s=rate, duration_s=total_s)
    failed = [str(task.exception()) for task in beside if task.done()]
    for task in beside:
        task.cancel()
    await asyncio.gather(*beside, return_exceptions=True)
    load.close()
    after = await until_quiet(tree, before)
    span = Span(total_s, await compared_s(tree, began_at))
    memory = growth(samples, span)
    wrong = [f"{name}: {count} times" for name, count in load.outcome.wrong.items()]
    problems = [*failed, *wrong, *grown(memory, span), *left_behind(before, after)]
    result = {
        "seconds": total_s,
        "books_compared_after_s": round(span.compared_s, 1),
        "closed_loop_per_s": round(measured, 1),
        "asked_per_s": round(rate, 1),
        "answers": dict(load.outcome.answers),
        "latency_ms": percentiles_ms(load.outcome.latencies_s),
        "memory_mib": {
            name: {
                "warm": round(start / 2**20, 1),
                "end": round(end / 2**20, 1),
                "growth_percent": round(100 * (end / start - 1), 2),
            }
            for name, (start, end) in memory.items()
        },
        "held_before": before,
        "held_after": after,
        "problems": problems,
    }
    return result


@contextmanager
def running(folder: Path) -> Iterator[tuple[Tree, dict[str, str]]]:
    stub_port, port = free_port(), free_port()
    home, config = folder / "home", folder / "tollgate.toml"
    config.write_text(CONFIG.replace("STUB_PORT", str(stub_port)))
    stub_log, up_log = folder / "stub.log", folder / "up.log"
    stub_command = [sys.executable, "-m", "bench.tools.stub_upstream", str(stub_port)]
    up_command = [str(Path(sys.executable).parent / "tollgate"), "up", "--home", str(home)]
    up_command += ["--port", str(port), "--config", str(config), "--workers", "1"]
    cores = os.sched_getaffinity(0)
    with (
        process(stub_command, stub_log, cores) as stub,
        process(up_command, up_log, cores) as up,
    ):
        wait_until_ready(f"http://127.0.0.1:{stub_port}/v1", stub, stub_log)
        wait_until_ready(f"http://127.0.0.1:{port}/health/ready", up, up_log)
        credentials: dict[str, str] = json.loads((home / "credentials.json").read_text())
        yield Tree(up.pid, home, port, stub_port), credentials


def run(minutes: float, folder: Path) -> Any:
    with running(folder) as (tree, credentials):
        limited = make_key(tree, credentials)
        mix = kinds(credentials["base_url"], credentials["api_key"], limited)
        load = Load(credentials["base_url"], mix)
        return uvloop.run(soak(tree, load, credentials, 60 * minutes))


def make_key(tree: Tree, credentials: dict[str, str]) -> str:
    """One on the plan that lets little pass."""
    headers = {"authorization": f"Bearer {credentials['admin_key']}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{tree.port}", headers=headers) as http:
        project_id = http.get("/v1/admin/projects").json()["data"][0]["id"]
        asked = {"name": "little", "project_id": project_id, "scopes": ["inference"]}
        made = http.post("/v1/admin/keys", json=asked | {"plan": "little"})
        made.raise_for_status()
        key: str = made.json()["value"]
        return key


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--dry", action="store_true", help="print the result, record nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tg-soak-", dir="/tmp") as folder:
        result = run(options.minutes, Path(folder))
    print(json.dumps(result, indent=2))
    if not options.dry:
        print(record("soak", result))
    sys.exit(1 if result["problems"] else 0)


if __name__ == "__main__":
    main()
