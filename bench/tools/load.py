"""A load generator for chat completions: HTTP/1.1 with keep-alive, closed and open loop, SSE-aware.

In a closed loop each connection asks again as soon as it was answered: it measures capacity. In an
open loop requests begin on a schedule, whatever became of those before, and latency counts from the
scheduled time: it measures what a caller would wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import httptools
import msgspec

REQUEST_TIMEOUT_S = 10.0
MAX_OPEN = 256
"""Connections of an open loop; beyond it a request is counted as an error, not sent."""
EVENT_END = b"\n\n"


class LoadTarget(Protocol):
    """The requests of a load: each connection of a closed loop, and each time of an open one, has a
    `request` of its own. `url`: where to."""

    @property
    def url(self) -> str: ...

    def request(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Target:
    """The address that requests are sent to."""

    url: str
    model: str
    api_key: str | None
    stream: bool
    headers: tuple[tuple[str, str], ...] = ()
    """Sent beside those that every request has."""

    def body(self) -> bytes:
        messages = [{"role": "user", "content": "Tell me something about tollgates, please."}]
        return msgspec.json.encode(
            {"model": self.model, "messages": messages, "stream": self.stream}
        )

    def request(self) -> bytes:
        parts, body = urlsplit(self.url), self.body()
        lines = [
            f"POST {parts.path}/chat/completions HTTP/1.1",
            f"host: {parts.netloc}",
            "content-type: application/json",
            f"content-length: {len(body)}",
        ]
        if self.api_key is not None:
            lines.append(f"authorization: Bearer {self.api_key}")
        lines += [f"{name}: {value}" for name, value in self.headers]
        return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass(slots=True)
class Answer:
    """One response. Times are `time.perf_counter`'s."""

    status: int = 0
    first_byte_at: float = 0.0
    """The time of the body's first byte."""
    ended_at: float = 0.0
    num_events: int = 0


class Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[Answer] | None = None
        self._answer = Answer()
        self._carry = b""

    @classmethod
    async def open(cls, target: LoadTarget) -> Connection:
        parts = urlsplit(target.url)
        loop = asyncio.get_running_loop()
        host, port = parts.hostname or "", parts.port or 80
        _, connection = await loop.create_connection(cls, host, port)
        return connection

    async def ask(self, request: bytes) -> Answer:
        """Raises ConnectionError, TimeoutError."""
        assert self._transport is not None and self._done is None
        self._answer, self._carry = Answer(), b""
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                return await self._done
        finally:
            self._done = None

    @property
    def num_events(self) -> int:
        """That have come of the answer under way."""
        return self._answer.num_events

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are no subclass of it
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(exc or ConnectionResetError("closed by the server"))

    # httptools

    def on_body(self, body: bytes) -> None:
        if not self._answer.first_byte_at:
            self._answer.first_byte_at = time.perf_counter()
        seen = self._carry + body
        self._answer.num_events += seen.count(EVENT_END)
        self._carry = b"\n" if seen.endswith(b"\n") and not seen.endswith(EVENT_END) else b""

    def on_message_complete(self) -> None:
        self._answer.ended_at = time.perf_counter()
        self._answer.status = self._parser.get_status_code()
        if self._done is not None and not self._done.done():
            self._done.set_result(self._answer)


@dataclass(slots=True)
class Tally:
    """The measurements of a run, in seconds."""

    latencies_s: list[float] = field(default_factory=list)
    first_bytes_s: list[float] = field(default_factory=list)
    num_events: int = 0
    num_errors: int = 0
    elapsed_s: float = 0.0

    def add(self, answer: Answer, asked_at: float) -> None:
        if answer.status != 200:
            self.num_errors += 1
            return
        self.latencies_s.append(answer.ended_at - asked_at)
        self.first_bytes_s.append(answer.first_byte_at - asked_at)
        self.num_events += answer.num_events

    def summary(self) -> dict[str, Any]:
        return {
            "requests": len(self.latencies_s),
            "errors": self.num_errors,
            "requests_per_s": round(len(self.latencies_s) / self.elapsed_s, 1),
            "events_per_s": round(self.num_events / self.elapsed_s, 1),
            "latency_ms": {
                **percentiles_ms(self.latencies_s),
                "max": round(1000 * max(self.latencies_s, default=0.0), 3),
            },
            "first_byte_ms": percentiles_ms(self.first_bytes_s),
        }


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Nearest rank; nothing for nothing."""
    ordered = sorted(seconds)
    return {
        f"p{percent}": round(1000 * ordered[(len(ordered) - 1) * percent // 100], 3)
        for percent in (50, 99)
        if ordered
    }


async def closed_loop(target: LoadTarget, *, connections: int, duration_s: float) -> Tally:
    tally = Tally()
    begun_at = time.perf_counter()
    deadline = begun_at + duration_s

    async def work() -> None:
        request = target.request()
        connection = await Connection.open(target)
        try:
            while (asked_at := time.perf_counter()) < deadline:
                try:
                    tally.add(await connection.ask(request), asked_at)
                except (OSError, httptools.HttpParserError):
                    tally.num_errors += 1
                    connection.close()
                    connection = await Connection.open(target)
        finally:
            connection.close()

    await asyncio.gather(*(work() for _ in range(connections)))
    tally.elapsed_s = time.perf_counter() - begun_at
    return tally


async def open_loop(target: LoadTarget, *, rate_per_s: float, duration_s: float) -> Tally:
    tally = Tally()
    idle: list[Connection] = []
    open_tasks: set[asyncio.Task[None]] = set()

    async def work(asked_at: float) -> None:
        connection: Connection | None = None
        try:
            connection = idle.pop() if idle else await Connection.open(target)
            tally.add(await connection.ask(target.request()), asked_at)
        except (OSError, httptools.HttpParserError):
            tally.num_errors += 1
            if connection is not None:
                connection.close()
        else:
            idle.append(connection)

    begun_at = time.perf_counter()
    for number in range(int(rate_per_s * duration_s)):
        asked_at = begun_at + number / rate_per_s
        await asyncio.sleep(max(0.0, asked_at - time.perf_counter()))
        if len(open_tasks) >= MAX_OPEN:
            tally.num_errors += 1
            continue
        task = asyncio.create_task(work(asked_at))
        open_tasks.add(task)
        task.add_done_callback(open_tasks.discard)
    await asyncio.gather(*open_tasks)
    tally.elapsed_s = time.perf_counter() - begun_at
    for connection in idle:
        connection.close()
    return tally
