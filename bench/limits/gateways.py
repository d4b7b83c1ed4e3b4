"""Whole gateways that share the limits of one organization: `tollgate up` with four workers and its
own engine, asked for more than its plans let pass.

What passed is not taken from the gateways' word: Redis itself tells each script that it runs, when,
and with what (MONITOR).
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httptools
import msgspec
import redis

from bench.gateway import process, share_cores, wait_until_ready
from bench.limits.windows import worst_ratio
from bench.tools.load import Connection, Target
from bench.tools.ports import free_port
from gateway.home import Home
from gateway.limits.limiter import MAX_AHEAD_TOKENS
from gateway.limits.redis.scripts import script_text
from gateway.principal import MINUTE_US
from gateway.processes import embedded_databases as embedded

NUM_WORKERS = 4
CONFIG = """
[plan.default]
tokens_per_minute = 24_000
output_tokens_per_minute = 12_000

[plan.all]
tokens_per_minute = 20_000
requests_per_minute = 3_000
max_concurrent_streams = 400
"""
MODEL = "penny"
ARGUMENT = re.compile(rb'"((?:[^"\\]|\\.)*)"')
NAMED = {
    hashlib.sha1(script_text(name).encode(), usedforsecurity=False).hexdigest(): name
    for name in ("admit", "extend", "settle")
}
RETRY_S = (0.2, 0.6)
LEFT_AFTER_S = (0.05, 2.0)
QUIET_TIMEOUT_S = 60.0
REFILL_S = 20.0
"""Before each load: until what the one before has used, and owes, has come back."""


class Stack(msgspec.Struct, frozen=True):
    url: str
    api_key: str
    redis_url: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    admitted_ratio: float
    """The worst of all scopes and kinds, over every window of up to a minute: what was reserved and
    used, against B + r t."""
    with_steps_ratio: float
    """The same with what was taken beyond reservations, against 2 B + r t + 64 for each stream."""
    ratios: dict[str, float]
    admitted: int
    refused: int
    left: int
    """By their clients."""
    other: int


@contextmanager
def running(folder: Path) -> Iterator[Stack]:
    folder.mkdir()
    home, config, log, port = folder / "home", folder / "toll.toml", folder / "log", free_port()
    config.write_text(CONFIG)
    tollgate = str(Path(sys.executable).parent / "tollgate")
    command = [tollgate, "up", "--home", str(home), "--port", str(port)]
    command += ["--config", str(config), "--workers", str(NUM_WORKERS)]
    both = set[int]().union(*share_cores())
    with process(command, log, both) as up:
        wait_until_ready(f"http://127.0.0.1:{port}/health/ready", up, log)
        given = [tollgate, "orgs", "set-plan", "default", "--plan", "all", "--home", str(home)]
        subprocess.run(given, check=True, capture_output=True)
        yield Stack(
            url=f"http://127.0.0.1:{port}/v1",
            api_key=json.loads((home / "credentials.json").read_text())["api_key"],
            redis_url=embedded.redis_url(Home(home)),
        )


def run(stack: Stack, concurrency: int, seconds: float) -> Outcome:
    time.sleep(REFILL_S)
    with redis.Redis.from_url(stack.redis_url) as store:
        watch = Watch(stack.redis_url)
        tally = asyncio.run(ask(stack, concurrency, seconds))
        deadline = time.monotonic() + QUIET_TIMEOUT_S
        while any(store.zcard(key) for key in store.scan_iter("tollgate:{*}:leases")):
            if time.monotonic() > deadline:
                raise RuntimeError("leases stay open")
            time.sleep(0.1)
        return judge(watch.end(), concurrency, tally)


async def ask(stack: Stack, concurrency: int, seconds: float) -> dict[str, int]:
    """`concurrency` clients that begin again as soon as they may."""
    draw = random.Random(concurrency)
    target = Target(url=stack.url, model=MODEL, api_key=stack.api_key, stream=True)
    tally = {"ok": 0, "refused": 0, "left": 0, "other": 0}
    deadline = time.monotonic() + seconds

    async def client() -> None:
        connection = await Connection.open(target)
        while time.monotonic() < deadline:
            patience_s = draw.uniform(*LEFT_AFTER_S) if draw.random() < 0.2 else 60.0
            try:
                async with asyncio.timeout(patience_s):
                    answer = await connection.ask(request(target, draw))
            except (OSError, httptools.HttpParserError):  # TimeoutError is an OSError
                tally["left"] += 1
                connection.close()
                connection = await Connection.open(target)
                continue
            kind = {200: "ok", 429: "refused"}.get(answer.status, "other")
            tally[kind] += 1
            if kind != "ok":
                await asyncio.sleep(draw.uniform(*RETRY_S))
        connection.close()

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return tally


def request(target: Target, draw: random.Random) -> bytes:
    """Whole or as a stream, with and without a bound of its own."""
    body: dict[str, Any] = {
        "model": target.model,
        "messages": [{"role": "user", "content": "Tell me of a toll. " * draw.randint(1, 12)}],
        "stream": draw.random() < 0.7,
    }
    if draw.random() < 0.6:
        body["max_tokens"] = draw.randint(1, 200)
    head, _, _ = target.request().partition(b"\r\n\r\n")
    encoded = msgspec.json.encode(body)
    length = b"content-length: %d" % len(encoded)
    return re.sub(rb"content-length: \d+", length, head) + b"\r\n\r\n" + encoded


class Watch:
    """Lines of MONITOR that are calls of the limiter's scripts."""

    def __init__(self, url: str) -> None:
        pool: Any = redis.Redis.from_url(url).connection_pool
        self._connection = pool.get_connection()
        self._connection.send_command("MONITOR")
        self._connection.read_response()
        self._file = self._connection._sock.makefile("rb")
        self._lines: list[bytes] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for line in self._file:
                if b'] "EVAL' in line:
                    self._lines.append(line)
        except OSError:  # closed: that was all
            return

    def end(self) -> list[bytes]:
        self._connection.disconnect()
        self._thread.join()
        return self._lines


@dataclass
class Lease:
    at_us: int
    reserved: dict[str, int]
    buckets: list[tuple[str, str, int, int]]
    """(scope's key, kind, limit, burst), of a minute."""
    steps: list[tuple[int, int]] = field(default_factory=list)
    """(moment, output tokens)."""
    used: dict[str, int] | None = None
    """None: refused."""


def leases_of(lines: list[bytes]) -> dict[str, Lease]:
    found: dict[str, Lease] = {}
    for line in lines:
        seconds, micro = re.match(rb"\+(\d+)\.(\d+)", line).groups()  # type: ignore[union-attr]
        at_us = int(seconds) * 1_000_000 + int(micro)
        arguments = [codecs.escape_decode(each)[0] for each in ARGUMENT.findall(line)]
        script, packed = arguments[1], arguments[-1]
        digest = script.decode() if arguments[0] == b"EVALSHA" else hashlib.sha1(script).hexdigest()
        match NAMED.get(digest):
            case "admit":
                lease_id, _, units, asked, *_ = msgspec.msgpack.decode(packed)
                keys = [key.decode() for key in arguments[6 : 6 + len(asked)]]
                buckets = [
                    (key, kind, limit, burst)
                    for key, (_, each) in zip(keys, asked, strict=True)
                    for kind, limit, burst, window in each
                    if window == MINUTE_US
                ]
                found[lease_id] = Lease(at_us, units, buckets)
            case "extend":
                for lease_id, units, *_ in msgspec.msgpack.decode(packed):
                    if lease_id in found and units["o"]:
                        found[lease_id].steps.append((at_us, units["o"]))
            case "settle":
                lease_id, used, *_ = msgspec.msgpack.decode(packed)
                if lease_id in found:
                    found[lease_id].used = used
    return found


def judge(lines: list[bytes], concurrency: int, tally: dict[str, int]) -> Outcome:
    leases = leases_of(lines)
    admitted = [lease for lease in leases.values() if lease.used is not None]
    first: dict[tuple[str, str, int, int], list[tuple[int, int]]] = {}
    in_all: dict[tuple[str, str, int, int], list[tuple[int, int]]] = {}
    for lease in admitted:
        assert lease.used is not None
        for bucket in lease.buckets:
            kind = bucket[1]
            kept = min(lease.used[kind], lease.reserved[kind])
            first.setdefault(bucket, []).append((lease.at_us, kept))
            in_all.setdefault(bucket, []).append((lease.at_us, kept))
            left = lease.used[kind] - kept if kind in "to" else 0
            for at_us, step in lease.steps:
                in_all[bucket].append((at_us, min(step, left)))
                left -= min(step, left)
    window = {"longest_us": MINUTE_US, "minute_us": MINUTE_US}
    ratios, with_steps = {}, 0.0
    for bucket, events in first.items():
        key, kind, limit, burst = bucket
        name = f"{key.rpartition('}:')[2].partition(':')[0]} {kind}"
        ratios[name] = worst_ratio(events, base=burst, limit=limit, **window)
        base = 2 * burst + concurrency * MAX_AHEAD_TOKENS
        ratio = worst_ratio(in_all[bucket], base=base, limit=limit, **window)
        with_steps = max(with_steps, ratio)
    return Outcome(
        admitted_ratio=max(ratios.values()),
        with_steps_ratio=with_steps,
        ratios=ratios,
        admitted=len(admitted),
        refused=len(leases) - len(admitted),
        left=tally["left"],
        other=tally["other"],
    )
