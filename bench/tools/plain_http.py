"""As much of HTTP as an upstream of a benchmark needs, for next to nothing."""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from typing import cast

MAX_HEAD_BYTES = 64 * 1024
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
HEAD_END = b"\r\n\r\n"


class PlainHttp(asyncio.Protocol, ABC):
    """Reads heads, and bodies of content-length."""

    def __init__(self) -> None:
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    @abstractmethod
    def answer(self, transport: asyncio.Transport, head: bytes, body: bytes) -> None:
        """`head`: without its end."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are no subclass of it
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._buffer += data
        while (head_end := self._buffer.find(HEAD_END)) >= 0:
            found = LENGTH.search(self._buffer, 0, head_end)
            begin = head_end + len(HEAD_END)
            end = begin + (int(found[1]) if found else 0)
            if len(self._buffer) < end:
                return
            head, body = self._buffer[:head_end], self._buffer[begin:end]
            self._buffer = self._buffer[end:]
            self.answer(self._transport, head, body)
        if len(self._buffer) > MAX_HEAD_BYTES:
            self._transport.abort()
