"""Count what an idle installation does: processor time, wake-ups, Postgres transactions and Redis
commands of each second in which nobody asks for anything.

`python -m bench.idle [--seconds S] [--workers N] [--dry]`: starts `tollgate up` with penny in a
home of its own, with the embedded stores, waits until it has settled, and reads the kernel's and
the stores' own counts before and after. A wake-up is a voluntary context switch of any thread of a
process. Counts of transactions are all processes' together: the workers', the supervisor's and the
two of this benchmark's own, which are taken off.

Counts do not depend on how busy the machine is; processor time does a little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import asyncpg
import psutil
from redis import Redis

from bench.gateway import process, wait_until_ready
from bench.tools.ports import free_port
from bench.tools.record import record
from gateway.home import Home
from gateway.processes.embedded_databases import postgres_url, redis_url

SETTLE_S = 75.0
"""A start has done by then what it leaves for a minute later."""
REPORT_S = 12.0
"""An idle process of Postgres tells of its transactions after ten seconds at the latest."""
GOALS = {"cpu_percent": 0.5, "wakeups_per_s": 10.0, "transactions_per_s": 0.2}
"""The bounds of one idle worker."""
ENGINE_CPU_PERCENT = 0.2


def kind_of(process: psutil.Process) -> str | None:
    """Return what a process of the tree is; None: of the stores, or of a helper."""
    line = process.cmdline()
    for kind, word in (("worker", "worker"), ("engine", "engine"), ("supervisor", "up")):
        if word in line:
            return kind
    return None


def wakeups(process: psutil.Process) -> int:
    """Count the voluntary context switches of all threads of a process that live now."""
    found = 0
    for status in Path(f"/proc/{process.pid}/task").glob("*/status"):
        for line in status.read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                found += int(line.split()[1])
    return found


def look_at(tree: list[tuple[str, psutil.Process]]) -> dict[int, tuple[float, int]]:
    """Return by process id (processor seconds, wake-ups)."""
    return {each.pid: (sum(each.cpu_times()[:2]), wakeups(each)) for _, each in tree}


async def leave_alone(home: Home) -> None:
    """Keep Postgres from vacuuming by itself: those transactions are none of the gateway's."""
    url = postgres_url(home).replace("postgresql+asyncpg", "postgresql")
    conn = await asyncpg.connect(url)
    try:
        await conn.execute("ALTER SYSTEM SET autovacuum = off")
        await conn.execute("SELECT pg_reload_conf()")
    finally:
        await conn.close()


async def transactions(home: Home) -> int:
    """Count the transactions of all databases, this one's own included."""
    url = postgres_url(home).replace("postgresql+asyncpg", "postgresql")
    conn = await asyncpg.connect(url)
    try:
        asked = "SELECT sum(xact_commit + xact_rollback)::bigint FROM pg_stat_database"
        found: int = await conn.fetchval(asked)
        return found
    finally:
        await conn.close()


def commands(store: Redis) -> dict[str, int]:
    """Return how often each command was carried out."""
    found: dict[str, Any] = store.info("commandstats")
    return {name.removeprefix("cmdstat_"): each["calls"] for name, each in found.items()}


def measure(root: int, home: Home, seconds: float) -> dict[str, Any]:
    """Count for so long. `root`: the supervisor's process id."""
    supervisor = psutil.Process(root)
    all_found = [supervisor, *supervisor.children(recursive=True)]
    tree = [(kind, each) for each in all_found if (kind := kind_of(each)) is not None]
    store = Redis.from_url(redis_url(home))
    transacted = asyncio.run(transactions(home))
    begun_at, said, before = time.monotonic(), commands(store), look_at(tree)
    time.sleep(seconds)
    after, said_after, took_s = look_at(tree), commands(store), time.monotonic() - begun_at
    time.sleep(min(REPORT_S, seconds))
    transacted = asyncio.run(transactions(home)) - transacted - 1
    counted_s = time.monotonic() - begun_at
    by_command = {name: (n - said.get(name, 0)) / took_s for name, n in said_after.items()}
    by_command.pop("info", None)
    processes = [
        {
            "kind": kind,
            "cpu_percent": round(100 * (after[each.pid][0] - before[each.pid][0]) / took_s, 2),
            "wakeups_per_s": round((after[each.pid][1] - before[each.pid][1]) / took_s, 1),
        }
        for kind, each in tree
    ]
    return {
        "seconds": round(took_s, 1),
        "processes": processes,
        "transactions_per_s": round(transacted / counted_s, 2),
        "redis_commands_per_s": round(sum(by_command.values()), 1),
        "redis_commands": {name: round(n, 2) for name, n in by_command.items() if n},
    }


def table(result: dict[str, Any]) -> str:
    lines = [f"{'':12}{'% of a core':>14}{'wake-ups/s':>14}"]
    lines += [
        f"{each['kind']:12}{each['cpu_percent']:>14.2f}{each['wakeups_per_s']:>14.1f}"
        for each in result["processes"]
    ]
    lines.append(f"Postgres transactions/s, of all: {result['transactions_per_s']:.2f}")
    lines.append(f"Redis commands/s, of all: {result['redis_commands_per_s']:.1f}")
    goals = ", ".join(f"{name} <= {bound:g}" for name, bound in GOALS.items())
    lines.append(f"to reach, a worker: {goals}; an engine: <= {ENGINE_CPU_PERCENT} % of a core")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--dry", action="store_true", help="record nothing")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="idle-") as folder:
        home, port = Home(Path(folder) / "home"), free_port()
        command = [str(Path(sys.executable).parent / "tollgate"), "up", "--home", str(home.root)]
        command += ["--port", str(port), "--workers", str(asked.workers)]
        log = Path(folder) / "log"
        with process(command, log, os.sched_getaffinity(0)) as started:
            wait_until_ready(f"http://127.0.0.1:{port}/health/ready", started, log)
            asyncio.run(leave_alone(home))
            time.sleep(min(SETTLE_S, asked.seconds))
            result = {"workers": asked.workers} | measure(started.pid, home, asked.seconds)
    print(table(result))
    if not asked.dry:
        record("idle", result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
