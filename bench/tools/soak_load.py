"""The mixed load of `bench.soak`: what is asked how often, and what must come of it.

Every kind says which answers are right; anything else is counted, and a soak with any of it fails.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httptools
import httpx
import msgspec

from bench.tools.load import Connection, Target

PENNY, STUB = "penny", "stub"
MAX_OPEN = 256
"""Requests under way; the next ones begin as these end. The warm-up has so many, once: what the
processes hold then is the most that a pause of the machine makes them hold later."""
MAX_LATE = 0.01
"""The tolerated delay as a share of the planned time; a longer run means that the load was more
than the machine sustains."""
SLOW_READERS = 4
SLOW_BYTES, SLOW_PAUSE_S = 256, 0.25
SLOW_TOKENS = 64
KEY_CHANGE_S = 2.0
SEED = 5


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of request, and its weight among a hundred."""

    name: str
    weight: int
    request: bytes
    expected: frozenset[int]
    leaves_within_s: float | None = None
    """The client goes away at some moment before."""


@dataclass(slots=True)
class Outcome:
    """The outcome of all requests."""

    answers: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    latencies_s: list[float] = field(default_factory=list)


def chat(
    base_url: str, key: str | None, model: str, *, stream: bool = False, max_tokens: int = 16
) -> bytes:
    target = Target(url=base_url, model=model, api_key=key, stream=stream)
    head, _, body = target.request().partition(b"\r\n\r\n")
    fields = msgspec.json.decode(body) | {"max_tokens": max_tokens}
    content = msgspec.json.encode(fields)
    kept = [line for line in head.split(b"\r\n") if not line.startswith(b"content-length")]
    return b"\r\n".join([*kept, b"content-length: %d" % len(content), b"", content])


def kinds(base_url: str, key: str, limited_key: str) -> tuple[Kind, ...]:
    """`limited_key`: of a plan that lets little pass."""
    ok = frozenset({200})
    return (
        Kind("upstream, whole", 45, chat(base_url, key, STUB), ok),
        Kind("upstream, stream", 30, chat(base_url, key, STUB, stream=True), ok),
        Kind("penny, whole", 3, chat(base_url, key, PENNY), ok),
        Kind("penny, stream", 3, chat(base_url, key, PENNY, stream=True), ok),
        Kind("no such model", 4, chat(base_url, key, "gpt-99"), frozenset({404})),
        Kind("no such key", 4, chat(base_url, "sk-tg-none", STUB), frozenset({401})),
        Kind("limited", 6, chat(base_url, limited_key, STUB), frozenset({200, 429})),
        Kind(
            *("penny, left", 2, chat(base_url, key, PENNY, stream=True, max_tokens=200), ok),
            leaves_within_s=0.5,
        ),
        Kind(
            *("upstream, left", 3, chat(base_url, key, STUB, stream=True), ok),
            leaves_within_s=0.01,
        ),
    )


class Load:
    """Draws kinds by their weights and asks on connections that it keeps."""

    def __init__(self, base_url: str, all_kinds: Sequence[Kind]) -> None:
        self._target = Target(url=base_url, model=STUB, api_key=None, stream=False)
        self._kinds = all_kinds
        self._weights = [kind.weight for kind in all_kinds]
        self._random = random.Random(SEED)
        self._idle: list[Connection] = []
        self.outcome = Outcome()

    async def ask(self) -> None:
        (kind,) = self._random.choices(self._kinds, self._weights)
        began = time.perf_counter()
        connection: Connection | None = None
        try:
            connection = self._idle.pop() if self._idle else await Connection.open(self._target)
            if kind.leaves_within_s is not None:
                await self._leave(connection, kind)
                return
            answer = await connection.ask(kind.request)
        except (OSError, httptools.HttpParserError) as error:
            self.outcome.wrong[f"{kind.name}: {type(error).__name__}"] += 1
            if connection is not None:
                connection.close()
            return
        self._idle.append(connection)
        self.outcome.latencies_s.append(time.perf_counter() - began)
        self.outcome.answers[kind.name] += 1
        if answer.status not in kind.expected:
            self.outcome.wrong[f"{kind.name}: {answer.status}"] += 1

    async def _leave(self, connection: Connection, kind: Kind) -> None:
        assert kind.leaves_within_s is not None
        asking = asyncio.create_task(connection.ask(kind.request))
        await asyncio.wait([asking], timeout=self._random.uniform(0, kind.leaves_within_s))
        connection.close()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        self.outcome.answers[kind.name] += 1

    async def closed(self, *, connections: int, duration_s: float) -> float:
        """Requests per second that `connections` get answered."""
        deadline = time.monotonic() + duration_s
        before = self.outcome.answers.total()

        async def work() -> None:
            while time.monotonic() < deadline:
                await self.ask()

        await asyncio.gather(*(work() for _ in range(connections)))
        return (self.outcome.answers.total() - before) / duration_s

    async def open(self, *, rate_per_s: float, duration_s: float) -> None:
        """At this rate, whatever becomes of those before, while fewer than MAX_OPEN are under way;
        after a pause the delay is made up for."""
        places = asyncio.Semaphore(MAX_OPEN)
        begun_at = time.perf_counter()

        async def ask() -> None:
            try:
                await self.ask()
            finally:
                places.release()

        async with asyncio.TaskGroup() as under_way:
            for number in range(int(rate_per_s * duration_s)):
                await asyncio.sleep(max(0.0, begun_at + number / rate_per_s - time.perf_counter()))
                await places.acquire()
                under_way.create_task(ask())
        if time.perf_counter() - begun_at > (1 + MAX_LATE) * duration_s:
            self.outcome.wrong["overloaded"] += 1

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


async def read_slowly(base_url: str, key: str) -> None:
    """One stream of penny's after the other, a little at a time, until cancelled."""
    target = Target(url=base_url, model=PENNY, api_key=key, stream=True)
    host, _, port = target.url.removeprefix("http://").partition("/")[0].partition(":")
    request = chat(base_url, key, PENNY, stream=True, max_tokens=SLOW_TOKENS)
    while True:
        reader, writer = await asyncio.open_connection(host, int(port), limit=SLOW_BYTES)
        try:
            writer.write(request)
            while (data := await reader.read(SLOW_BYTES)) and b"[DONE]" not in data:
                await asyncio.sleep(SLOW_PAUSE_S)
        finally:
            writer.close()


async def change_keys(origin: str, admin_key: str, outcome: Outcome) -> None:
    """Make a key, use it, revoke it, see it refused, until cancelled."""
    headers = {"authorization": f"Bearer {admin_key}"}
    async with httpx.AsyncClient(base_url=origin, timeout=30) as http:
        listed = await http.get("/v1/admin/projects", headers=headers)
        project_id = listed.json()["data"][0]["id"]
        while True:
            asked = {"name": "soak", "project_id": project_id, "scopes": ["inference"]}
            answer = await http.post("/v1/admin/keys", json=asked, headers=headers)
            if not answer.is_success:
                outcome.wrong[f"key made: {answer.status_code}"] += 1
                await asyncio.sleep(KEY_CHANGE_S)
                continue
            made = answer.json()
            bearer = {"authorization": f"Bearer {made['value']}"}
            used = await http.get("/v1/models", headers=bearer)
            gone = await http.post(f"/v1/admin/keys/{made['id']}/revoke", headers=headers)
            await asyncio.sleep(KEY_CHANGE_S)
            refused = await http.get("/v1/models", headers=bearer)
            outcome.answers["key change"] += 1
            seen = (used.status_code, gone.is_success, refused.status_code)
            if seen != (200, True, 401):
                outcome.wrong[f"key change: {seen}"] += 1
