"""An upstream that costs next to nothing: it answers every chat completion with fixed bytes.

`python -m bench.tools.stub_upstream PORT [GAP_MS]`. What a gateway adds is measured in front of it.
A request with `"stream": true` gets NUM_CHUNKS chunks of content, usage and `[DONE]`, in one write
or, where there is a gap, each event in a write of its own, GAP_MS after the one before (0: in the
next turn of the loop); others a body.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import uvloop

from bench.tools.plain_http import HEAD_END, PlainHttp

NUM_CHUNKS = 64
PROMPT_TOKENS = 12

STREAM = re.compile(rb'"stream"\s*:\s*true')
USAGE = {
    "prompt_tokens": PROMPT_TOKENS,
    "completion_tokens": NUM_CHUNKS,
    "total_tokens": PROMPT_TOKENS + NUM_CHUNKS,
}


def completion() -> bytes:
    message = {"role": "assistant", "content": "word " * NUM_CHUNKS}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return msgspec.json.encode(named("chat.completion", choices=[choice], usage=USAGE))


def named(kind: str, **fields: Any) -> dict[str, Any]:
    return {"id": "chatcmpl-stub", "object": kind, "created": 1, "model": "stub", **fields}


def events() -> list[bytes]:
    deltas: list[tuple[dict[str, str], str | None]] = [({"role": "assistant", "content": ""}, None)]
    deltas += [({"content": "word "}, None)] * NUM_CHUNKS
    deltas += [({}, "stop")]
    chunks = [
        named(
            "chat.completion.chunk",
            choices=[{"index": 0, "delta": delta, "finish_reason": reason}],
            usage=None,
        )
        for delta, reason in deltas
    ]
    chunks.append(named("chat.completion.chunk", choices=[], usage=USAGE))
    payloads = [*map(msgspec.json.encode, chunks), b"[DONE]"]
    return [b"data: " + payload + b"\n\n" for payload in payloads]


def whole_response() -> bytes:
    body = completion()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d"
    return head % len(body) + HEAD_END + body


def stream_response() -> list[bytes]:
    """The head with the first event, the other events, the end."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked"
    first, *others = [b"%x\r\n%b\r\n" % (len(event), event) for event in events()]
    return [head + HEAD_END + first, *others, b"0\r\n\r\n"]


WHOLE = whole_response()
PIECES = stream_response()
STREAMED = b"".join(PIECES)


class StubProtocol(PlainHttp):
    """`gap_s`: between the events of a stream; None: all in one write."""

    def __init__(self, gap_s: float | None = None) -> None:
        super().__init__()
        self._gap_s = gap_s

    def answer(self, transport: asyncio.Transport, head: bytes, body: bytes) -> None:
        if STREAM.search(body) is None:
            transport.write(WHOLE)
        elif self._gap_s is None:
            transport.write(STREAMED)
        else:
            self._write_next(transport, iter(PIECES), self._gap_s)

    def _write_next(
        self, transport: asyncio.Transport, pieces: Iterator[bytes], gap_s: float
    ) -> None:
        piece = next(pieces, None)
        if piece is None or transport.is_closing():
            return
        transport.write(piece)
        loop = asyncio.get_running_loop()
        if gap_s:
            loop.call_later(gap_s, self._write_next, transport, pieces, gap_s)
        else:
            loop.call_soon(self._write_next, transport, pieces, gap_s)


async def serve(port: int, gap_s: float | None) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(partial(StubProtocol, gap_s), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    gaps_ms = [float(each) for each in sys.argv[2:]]
    uvloop.run(serve(int(sys.argv[1]), gaps_ms[0] / 1000 if gaps_ms else None))
