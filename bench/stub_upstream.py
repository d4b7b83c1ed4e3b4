"""An upstream that costs next to nothing: it answers every chat completion with fixed bytes.

`python -m bench.stub_upstream PORT`. What a gateway adds is measured in front of it. A request with
`"stream": true` gets NUM_CHUNKS chunks of content, usage and `[DONE]` in one write; others a body.
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Any, cast

import msgspec
import uvloop

NUM_CHUNKS = 64
MAX_HEAD_BYTES = 64 * 1024
PROMPT_TOKENS = 12

STREAM = re.compile(rb'"stream"\s*:\s*true')
LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
HEAD_END = b"\r\n\r\n"
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


def stream_response() -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked"
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events())
    return head + HEAD_END + chunks + b"0\r\n\r\n"


WHOLE = whole_response()
STREAMED = stream_response()


class StubProtocol(asyncio.Protocol):
    """Reads a head and a body of content-length; knows no more of HTTP."""

    def __init__(self) -> None:
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are no subclass of it
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._buffer += data
        while (head_end := self._buffer.find(HEAD_END)) >= 0:
            found = LENGTH.search(self._buffer, 0, head_end)
            end = head_end + len(HEAD_END) + (int(found[1]) if found else 0)
            if len(self._buffer) < end:
                return
            body = self._buffer[head_end:end]
            self._buffer = self._buffer[end:]
            self._transport.write(STREAMED if STREAM.search(body) else WHOLE)
        if len(self._buffer) > MAX_HEAD_BYTES:
            self._transport.abort()


async def serve(port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(StubProtocol, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
