"""A scripted OpenAI-compatible server on a real socket, and what it usually says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from gateway.fleet.upstream.bounds import InputBound
from gateway.fleet.upstream.meter import UpstreamMeter
from gateway.fleet.upstream.replica import UpstreamReplica
from gateway.generate_request import GenerateRequest
from gateway.generation_events import MeteredUsage, RawChunk, RawRun, ReplicaEvent

UPSTREAM_MODEL = "vendor/big-32b"
API_KEY = "sk-upstream-very-secret"


@dataclass
class Exchange:
    """One request as the server saw it, and its hand on the connection."""

    headers: dict[str, str]
    body: dict[str, Any]
    writer: asyncio.StreamWriter
    target: str
    """The path and query of the request."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """The client closed the connection before the answer was complete."""

    async def head(self, status: int = 200, **headers: str) -> None:
        lines = [
            f"HTTP/1.1 {status} X",
            *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items()),
        ]
        await self.write("\r\n".join(lines).encode() + b"\r\n\r\n")

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, body: Any, status: int = 200, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        await self.head(
            status, content_type="application/json", content_length=str(len(data)), **headers
        )
        await self.write(data)

    async def begin_stream(self) -> None:
        await self.head(content_type="text/event-stream", transfer_encoding="chunked")

    async def send(self, *events: Any) -> None:
        """Each in an HTTP chunk of its own; a str or bytes goes out as it is."""
        for event in events:
            if isinstance(event, bytes):
                data = event
            else:
                text = event if isinstance(event, str) else json.dumps(event)
                data = f"data: {text}\n\n".encode()
            await self.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def end_stream(self) -> None:
        await self.write(b"0\r\n\r\n")

    async def flood(self, event: Any) -> None:
        """Send the same event until the client leaves."""
        try:
            while not self.left.is_set():
                await self.send(event)
                await asyncio.sleep(0)
        except ConnectionError:
            self.left.set()

    async def hang(self) -> None:
        """Until the client leaves."""
        await self.left.wait()


Script = Callable[[Exchange], Awaitable[None]]


class Upstream:
    """Runs `script` for every request; set it before the request is made."""

    def __init__(self) -> None:
        self.script: Script | None = None
        self.exchanges: list[Exchange] = []
        self.writers: set[asyncio.StreamWriter] = set()
        """The open connections."""
        self.num_connections = 0
        self.base_url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.writers.add(writer)
        try:
            while (exchange := await read_exchange(reader, writer)) is not None:
                self.exchanges.append(exchange)
                assert self.script is not None
                watching = asyncio.create_task(watch(reader, exchange))
                try:
                    await self.script(exchange)
                finally:
                    watching.cancel()
                    await asyncio.gather(watching, return_exceptions=True)
                if exchange.left.is_set() or writer.is_closing():
                    break
        except ConnectionError:
            pass  # the client left, which some scripts provoke
        finally:
            self.writers.discard(writer)
            writer.close()


async def read_exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> Exchange | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode().split("\r\n")[:-2]
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    body = await reader.readexactly(int(headers["content-length"]))
    return Exchange(headers, json.loads(body), writer, first.split(" ")[1])


async def watch(reader: asyncio.StreamReader, exchange: Exchange) -> None:
    """Nothing more is sent before the answer, so that a read only ever sees the end."""
    try:
        data = await reader.read(1)
        assert data == b""
    except ConnectionError:
        pass  # a reset is an end as well
    exchange.left.set()


USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 5,
    "total_tokens": 25,
    "prompt_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 4, "audio_tokens": None},
    "completion_tokens_details": {"reasoning_tokens": 2},
    "cost": 0.0123,
}
COUNTED = MeteredUsage(
    uncached_input=8, cache_read=8, cache_write=4, output=5, reasoning_output=2, estimated=False
)


def chunk(text: str | None = None, *, finish: str | None = None, **extra: Any) -> dict[str, Any]:
    delta = {} if text is None else {"content": text}
    return {
        "id": "chatcmpl-theirs",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": UPSTREAM_MODEL,
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        "usage": None,
        **extra,
    }


def usage_chunk() -> dict[str, Any]:
    return {**chunk(), "choices": [], "usage": USAGE}


def completion(**extra: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": "Hello there", "refusal": None}
    return {
        "id": "chatcmpl-theirs",
        "object": "chat.completion",
        "created": 7,
        "model": UPSTREAM_MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": USAGE,
        **extra,
    }


def new_meter(
    kind: type[UpstreamMeter] = UpstreamMeter,
    *,
    model: str = "m",
    n: int = 1,
    input_tokens: int = 9,
    most_input: int = 10**6,
    most_output: int = 10**6,
    **options: Any,
) -> UpstreamMeter:
    return kind(
        model=model,
        n=n,
        input_tokens=input_tokens,
        most_input=InputBound(most_input, lambda: most_input),
        most_output_tokens=most_output,
        **options,
    )


async def run(
    replica: UpstreamReplica, request: GenerateRequest, events: list[ReplicaEvent] | None = None
) -> list[ReplicaEvent]:
    """All events; those before an error are in `events`."""
    events = [] if events is None else events
    prepared = await replica.prepare(request)
    stream = replica.stream(prepared, attempt_id="attempt", cache_salt="salt")
    async with aclosing(stream):
        async for event in stream:
            events.append(event)
    return events


def chunks(events: list[ReplicaEvent]) -> list[Any]:
    payloads: list[bytes] = []
    for item in (item for event in events for item in event.items):
        if isinstance(item, RawRun):
            payloads += [item.before + text + item.after for text in item.texts]
        elif isinstance(item, RawChunk):
            payloads.append(item.payload)
    return [json.loads(payload) for payload in payloads]


def texts(events: list[ReplicaEvent]) -> list[str]:
    """The content of every chunk that was passed on."""
    choices = [choice for chunk in chunks(events) for choice in chunk["choices"]]
    return [choice["delta"]["content"] for choice in choices if "content" in choice["delta"]]


async def good_stream(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.send(chunk(""), chunk("Hel"), chunk("lo"), chunk(finish="stop"), usage_chunk())
    await exchange.send("[DONE]")
    await exchange.end_stream()
