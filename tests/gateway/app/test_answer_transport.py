"""An answer's head and the beginning of its body, as they are written."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.app.connection import MAX_JOINED_BYTES, AnswerTransport


class NotedWire(asyncio.Transport):
    """A transport that keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True


async def test_a_head_goes_out_with_the_beginning_of_its_body() -> None:
    wire = NotedWire()
    answers = AnswerTransport(wire, wire.close, asyncio.get_running_loop())
    for body in (b"body", b""):
        answers.begin()
        answers.write(b"head ")
        assert wire.written == []
        answers.write(body)
        assert wire.written == [b"head " + body]
        wire.written.clear()
    await asyncio.sleep(0)
    answers.write(b"more")
    assert wire.written == [b"more"]


async def test_a_head_waits_for_a_body_no_longer_than_for_the_next_turn() -> None:
    wire = NotedWire()
    answers = AnswerTransport(wire, wire.close, asyncio.get_running_loop())
    answers.begin()
    answers.write(b"head")
    await asyncio.sleep(0)
    assert wire.written == [b"head"]
    answers.write(b"body")
    assert wire.written == [b"head", b"body"]


async def test_a_long_body_is_not_copied_behind_its_head() -> None:
    wire, body = NotedWire(), bytes(MAX_JOINED_BYTES + 1)
    answers = AnswerTransport(wire, wire.close, asyncio.get_running_loop())
    answers.begin()
    answers.write(b"head")
    answers.write(body)
    assert wire.written == [b"head", body]


async def test_a_head_is_written_before_its_connection_is_closed_and_never_after() -> None:
    wire, gone = NotedWire(), NotedWire()
    for each in (wire, gone):
        answers = AnswerTransport(each, each.close, asyncio.get_running_loop())
        answers.begin()
        answers.write(b"head")
        if each is gone:
            each.close()
        answers.close()
    await asyncio.sleep(0)
    assert (wire.written, gone.written) == ([b"head"], [])
