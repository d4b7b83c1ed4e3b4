"""Measure what the MCP bridge costs: a call through the gateway beside the same call straight to
its server.

`python -m bench.mcp [--seconds S] [--sessions N] [--profile] [--dry]`: starts an MCP server that
costs next to nothing (`bench.tools.mcp_upstream`) and, in a home of its own, `tollgate up` with one
worker and everything on: keys, pins that `tollgate mcp approve` made, arguments and results checked
by their schemas, rules with a condition, the audit log in Postgres, sessions in Redis. In one run,
for each era in front of each era behind:

- added latency: calls on a schedule, straight and through the gateway by turns, at half the rate
  that one core must take, which is what the claim is about, and at a rate at which it mostly
  sleeps: each call then finds the processor's caches cold;
- calls per second of one worker on one core, as fast as it can, and the processor time of each; the
  clock runs until the last of them is in the audit log, and every one of them must be;

and a warm list of NUM_MANY tools, and the worker's memory with that many sessions of the older era
open, each having called a tool and with its own stream open, as SDKs do it.

Where there are two cores or more the gateway has all but the last, which the server, the load and
the stores have. `--profile` says instead where the processor time of a call goes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import asyncpg
import httpx
import uvloop

from bench.gateway import (
    PLAN,
    UNLIMITED,
    Meter,
    checked,
    process,
    share_cores,
    wait_until_ready,
)
from bench.tools.hot_path import Sampled, by_part
from bench.tools.hot_path import table as table_of_parts
from bench.tools.load import closed_loop, open_loop
from bench.tools.mcp_load import (
    ACCEPT,
    TIMEOUT_S,
    McpTarget,
    Requests,
    call_of,
    check,
    legacy,
    open_session,
)
from bench.tools.mcp_upstream import LEGACY, MODERN, NUM_MANY, TOOL
from bench.tools.ports import free_port
from bench.tools.record import record
from gateway.home import Home
from gateway.processes.embedded_databases import postgres_url, redis_url
from mcp_bridge.protocol.eras import SESSION_HEADER, VERSION_HEADER

ROOT = Path(__file__).resolve().parents[1]
TOLLGATE = str(Path(sys.executable).parent / "tollgate")
RATES_PER_S = {"added": 250.0, "added_idle": 50.0}
NUM_TURNS = 5
LIST_RATE_PER_S = 10.0
CONNECTIONS = 16
NUM_SESSIONS = 1000
WRITTEN_WITHIN_S = 120.0
MAX_ADDED_P50_MS, MIN_CALLS_PER_S, MAX_LIST_MS, MAX_SESSIONS_MB = 2.0, 500.0, 5.0, 300.0
SITES = {"new": MODERN, "old": LEGACY, "many": MODERN}
CONFIG = """
[[model]]
name = "none"
upstream = "http://127.0.0.1:9/v1"
"""
SERVER = """
[[mcp.servers]]
name = "{name}"
url = "{url}/{name}"
namespace = "{name}"
network = "loopback"
"""
RULES = [
    {"id": "reads", "effect": "allow", "tools": ["*__look_up*"], "when": "args.days < 10"},
    {"id": "never", "effect": "deny", "tools": ["*__delete_*"]},
]


class Pair(NamedTuple):
    """A client's era, and the server that it asks."""

    client: str
    server: str

    @property
    def title(self) -> str:
        return f"{self.client} to {SITES[self.server]}"


PAIRS = [Pair(client, server) for client in (MODERN, LEGACY) for server in ("new", "old")]


class Gateway(NamedTuple):
    """One that is up."""

    base: str
    key: str
    org_id: str
    project_id: str
    home: Home
    meter: Meter

    def place(self, namespace: str) -> McpTarget:
        return McpTarget(f"{self.base}/mcp/{self.org_id}/{self.project_id}/{namespace}", self.key)


@contextmanager
def upstream(folder: Path, cores: set[int]) -> Iterator[str]:
    port, log = free_port(), folder / "upstream.log"
    command = [sys.executable, "-m", "bench.tools.mcp_upstream", str(port)]
    with process(command, log, cores) as started:
        wait_until_ready(f"http://127.0.0.1:{port}/new", started, log)
        yield f"http://127.0.0.1:{port}"


@contextmanager
def gateway(
    folder: Path,
    url: str,
    served: set[int],
    loaded: set[int],
    *,
    models: str = CONFIG,
    scopes: Sequence[str] = ("mcp:call",),
) -> Iterator[Gateway]:
    """With a key of these scopes, and all that its servers offer approved."""
    home, port, log = folder / "home", free_port(), folder / "gateway.log"
    config = folder / "tollgate.toml"
    servers = "".join(SERVER.format(name=name, url=url) for name in SITES)
    config.write_text(models + PLAN.format(limit=UNLIMITED) + servers)
    command = [TOLLGATE, "up", "--home", str(home), "--port", str(port)]
    command += ["--config", str(config), "--workers", "1"]
    base = f"http://127.0.0.1:{port}"
    with process(command, log, served) as started:
        wait_until_ready(base + "/health/ready", started, log)
        meter = Meter(started.pid)
        meter.move_stores(loaded)
        granted = [part for scope in scopes for part in ("--scope", scope)]
        made = tollgate(home, "keys", "create", "--json", "--name", "bench", *granted)
        rules = folder / "rules.json"
        rules.write_text(json.dumps(RULES))
        for arguments in [("rules", str(rules)), *(("approve", name, "--all") for name in SITES)]:
            tollgate(home, "mcp", *arguments, "--config", str(config))
        found = uvloop.run(fetch(Home(home), "SELECT org_id, id FROM projects"))
        org_id, project_id = found[0]
        yield Gateway(base, json.loads(made)["key"], org_id, project_id, Home(home), meter)


def tollgate(home: Path, *arguments: str) -> str:
    command = [TOLLGATE, *arguments, "--home", str(home)]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


async def fetch(home: Home, query: str) -> list[asyncpg.Record]:
    url = postgres_url(home).replace("postgresql+asyncpg", "postgresql")
    connection = await asyncpg.connect(url)
    try:
        found: list[asyncpg.Record] = await connection.fetch(query)
        return found
    finally:
        await connection.close()


def num_recorded(home: Home) -> int:
    query = (
        "SELECT count(*) FROM audit_entries WHERE action = 'mcp.called'"
        " AND after::jsonb ->> 'outcome' = 'done'"
    )
    return int(uvloop.run(fetch(home, query))[0][0])


def until_recorded(home: Home, wanted: int) -> None:
    """Raises: SystemExit, where a call is missing or there is one too many."""
    deadline = time.monotonic() + WRITTEN_WITHIN_S
    while (found := num_recorded(home)) < wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    if found != wanted:
        raise SystemExit(f"{found} calls are in the audit log, and {wanted} were made")


class Bench(NamedTuple):
    url: str
    gateway: Gateway
    seconds: float

    def latency(self, asked: Requests, rate_per_s: float, seconds: float) -> dict[str, float]:
        """p50 and p99, in ms."""
        uvloop.run(closed_loop(asked, connections=1, duration_s=0.2))
        opened = open_loop(asked, rate_per_s=rate_per_s, duration_s=seconds)
        found: dict[str, float] = checked(uvloop.run(opened).summary())["latency_ms"]
        return found

    def added(self, direct: Requests, asked: Requests, rate_per_s: float) -> dict[str, Any]:
        """By turns, as a machine is not the same from one second to the next: the median of all
        turns, and of what each added."""
        seconds = self.seconds / NUM_TURNS
        with closing(direct), closing(asked):
            turns = [
                (
                    self.latency(direct, rate_per_s, seconds),
                    self.latency(asked, rate_per_s, seconds),
                )
                for _ in range(NUM_TURNS)
            ]
        found: dict[str, Any] = {"calls_per_s": rate_per_s}
        for each in turns[0][0]:
            straight = median(turn[0][each] for turn in turns)
            through = median(turn[1][each] for turn in turns)
            more = median(turn[1][each] - turn[0][each] for turn in turns)
            found[each] = {
                "straight_ms": round(straight, 3),
                "through_ms": round(through, 3),
                "added_ms": round(more, 3),
            }
        return found

    def pair(self, pair: Pair) -> dict[str, Any]:
        name = f"{pair.server}__{TOOL}"
        era, place = SITES[pair.server], self.gateway.place(pair.server)
        found: dict[str, Any] = {}
        for title, rate in RATES_PER_S.items():
            direct = Requests(McpTarget(f"{self.url}/{pair.server}"), era, *call_of(TOOL), 1)
            asked = Requests(place, pair.client, *call_of(name), CONNECTIONS)
            found[title] = self.added(direct, asked, rate)
        return {
            **found,
            **self.flooded(Requests(place, pair.client, *call_of(name), CONNECTIONS)),
        }

    def flooded(self, asked: Requests) -> dict[str, float]:
        """As fast as it can, until the audit log has all of it."""
        home, meter = self.gateway.home, self.gateway.meter
        with closing(asked):
            checked(uvloop.run(closed_loop(asked, connections=CONNECTIONS, duration_s=1)).summary())
            time.sleep(0.1)  # what was still to be answered has been
            settled = -1
            while settled != (now := num_recorded(home)):
                settled = now
                time.sleep(1)
            before, began_s = meter.cpu_s(), time.perf_counter()
            loop = closed_loop(asked, connections=CONNECTIONS, duration_s=self.seconds)
            closed = checked(uvloop.run(loop).summary())
            answered_s = time.perf_counter() - began_s
            until_recorded(home, settled + closed["requests"])
            recorded_s, after = time.perf_counter() - began_s, meter.cpu_s()
        cpu_ms = {
            f"{group}_cpu_ms": round(1000 * (after[group] - before[group]) / closed["requests"], 3)
            for group in after
        }
        return {
            "calls": closed["requests"],
            "answered_per_s": round(closed["requests"] / answered_s, 1),
            "recorded_per_s": round(closed["requests"] / recorded_s, 1),
            **cpu_ms,
        }

    def lists(self) -> dict[str, Any]:
        place = self.gateway.place("many")
        asked = {"straight": Requests(McpTarget(f"{self.url}/many"), MODERN, "tools/list", {}, 1)}
        for era in (MODERN, LEGACY):
            asked[era] = Requests(place, era, "tools/list", {}, CONNECTIONS)
        found = {}
        for name, each in asked.items():
            with closing(each):
                found[f"{name}_ms"] = self.latency(each, LIST_RATE_PER_S, self.seconds)
        return found

    def sessions(self, count: int) -> dict[str, Any]:
        place, meter = self.gateway.place("old"), self.gateway.meter
        before = meter.memory_mb()
        return {
            "sessions": count,
            "before_mb": before,
            "open_mb": uvloop.run(with_sessions(place, count, meter)),
        }


async def with_sessions(place: McpTarget, count: int, meter: Meter) -> dict[str, float]:
    """The worker's memory while they are open, each with its stream."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=1)
    async with httpx.AsyncClient(headers=place.headers, timeout=TIMEOUT_S, limits=limits) as http:
        streams: list[httpx.Response] = []
        ids: list[str] = []
        try:
            for _ in range(count):
                ids.append(await asyncio.to_thread(opened_and_called, place))
                headers = {
                    "accept": "text/event-stream",
                    VERSION_HEADER: LEGACY,
                    SESSION_HEADER: ids[-1],
                }
                request = http.build_request("GET", place.url, headers=headers)
                stream = await http.send(request, stream=True)
                streams.append(stream)
                stream.raise_for_status()
                await anext(stream.aiter_raw())
            return meter.memory_mb()
        finally:
            for stream in streams:
                await stream.aclose()
            for id_ in ids:
                headers = {VERSION_HEADER: LEGACY, SESSION_HEADER: id_}
                await http.delete(place.url, headers=headers)


def opened_and_called(place: McpTarget) -> str:
    with httpx.Client(headers={**place.headers, **ACCEPT}, timeout=TIMEOUT_S) as http:
        session = open_session(http, place.url)
        headers, body = legacy(*call_of(f"old__{TOOL}"), session)
        check(http.post(place.url, headers=headers, content=body))
        return session


def claims(result: Mapping[str, Any]) -> dict[str, bool]:
    pairs = result["calls"].values()
    added = [pair["added"]["p50"]["added_ms"] for pair in pairs]
    lists = [result["lists"][f"{era}_ms"]["p50"] for era in (MODERN, LEGACY)]
    return {
        "added_p50_at_most_2_ms": max(added) <= MAX_ADDED_P50_MS,
        "at_least_500_calls_per_s": min(p["recorded_per_s"] for p in pairs) >= MIN_CALLS_PER_S,
        "list_of_1000_at_most_5_ms": max(lists) <= MAX_LIST_MS,
        "1000_sessions_at_most_300_mb": result["sessions"]["sessions"] >= NUM_SESSIONS
        and result["sessions"]["open_mb"]["resident"] <= MAX_SESSIONS_MB,
    }


def table(result: Mapping[str, Any]) -> str:
    titles = ("straight", "added p50", "p99", "idle p50", "answered/s", "recorded/s", "CPU ms")
    lines = ["".join([f"{'client to server':28}", *(f"{title:>12}" for title in titles)])]
    for name, found in result["calls"].items():
        figures = (
            found["added"]["p50"]["straight_ms"],
            found["added"]["p50"]["added_ms"],
            found["added"]["p99"]["added_ms"],
            found["added_idle"]["p50"]["added_ms"],
            found["answered_per_s"],
            found["recorded_per_s"],
            found["serving_cpu_ms"],
        )
        lines.append("".join([f"{name:28}", *(f"{figure:12,.3f}" for figure in figures)]))
    lists = ", ".join(f"{name} {found['p50']}" for name, found in result["lists"].items())
    sessions = result["sessions"]
    lines.append(f"{NUM_MANY} tools, warm, p50: {lists}")
    lines.append(
        f"{sessions['sessions']} sessions: {sessions['open_mb']['resident']} MB resident, "
        f"{sessions['before_mb']['resident']} MB before"
    )
    lines += [f"{name}: {'holds' if held else 'BROKEN'}" for name, held in result["claims"].items()]
    return "\n".join(lines)


def run(bench: Bench, num_sessions: int) -> dict[str, Any]:
    result: dict[str, Any] = {
        "calls": {pair.title: bench.pair(pair) for pair in PAIRS},
        "lists": bench.lists(),
        "sessions": bench.sessions(num_sessions),
    }
    return {**result, "claims": claims(result)}


def profile(bench: Bench, folder: Path, served: set[int]) -> dict[str, Any]:
    """Profile calls from the newer era to the newer. Its stores are those of a gateway that serves
    nobody meanwhile."""
    home, port, file = bench.gateway.home, free_port(), folder / "samples.json"
    command = [sys.executable, "-m", "bench.tools.sampled", str(file), "--home", str(home.root)]
    command += ["--port", str(port), "--config", str(folder / "tollgate.toml")]
    stores = {
        "TOLLGATE_DATABASE_URL": postgres_url(home),
        "TOLLGATE_REDIS_URL": redis_url(home),
    }
    log = folder / "sampled.log"
    with process(command, log, served, **stores) as started:
        base = f"http://127.0.0.1:{port}"
        wait_until_ready(base + "/health/ready", started, log)
        place = bench.gateway._replace(base=base).place("new")
        asked = Requests(place, MODERN, *call_of(f"new__{TOOL}"), 1)
        uvloop.run(closed_loop(asked, connections=CONNECTIONS, duration_s=1))
        sampled = Sampled(started, file)
        sampled.begin()
        loop = closed_loop(asked, connections=CONNECTIONS, duration_s=bench.seconds)
        closed = checked(uvloop.run(loop).summary())
        found = sampled.end()
    return {"us": by_part(found, closed["requests"]), "samples": found["samples"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--sessions", type=int, default=NUM_SESSIONS, help="open at once")
    parser.add_argument("--profile", action="store_true", help="where a call's time goes, instead")
    parser.add_argument("--dry", action="store_true", help="print the result, record nothing")
    options = parser.parse_args()
    served, loaded = share_cores()
    load_average = round(os.getloadavg()[0], 2)
    os.sched_setaffinity(0, loaded)
    with tempfile.TemporaryDirectory(prefix="tg-bench-", dir="/tmp") as name, ExitStack() as stack:
        folder = Path(name)
        url = stack.enter_context(upstream(folder, loaded))
        bench = Bench(
            url, stack.enter_context(gateway(folder, url, served, loaded)), options.seconds
        )
        if options.profile:
            found = profile(bench, folder, served)
            print(table_of_parts(found["us"], {}))
            return
        result = {
            "cores": {"served": sorted(served), "load": sorted(loaded)},
            "seconds_each": options.seconds,
            "load_average_before": load_average,
            **run(bench, options.sessions),
        }
    print(table(result))
    print(json.dumps(result))
    if not options.dry:
        print(record("mcp", result))
    if not all(result["claims"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
