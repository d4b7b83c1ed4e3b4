"""An answer's head and body, as they are checked and written."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from gateway.app.answer_cycle import AnswerCycle
from tests.gateway.app.test_answer_transport import NotedWire

Headers = Sequence[tuple[bytes, bytes]]
DATE = (b"date", b"today")
LENGTH = (b"Content-Length", b"4")


class Answer:
    """Sends messages to a cycle of a request."""

    def __init__(self, method: str = "POST", *, is_kept: bool = True) -> None:
        self.wire, self.completed = NotedWire(), 0
        log: Any = logging.getLogger("test")
        self.cycle = AnswerCycle(
            *({"method": method}, self.wire, FlowControl(self.wire), log, log, False, [DATE]),  # type: ignore[arg-type]
            *(asyncio.Event(), False, is_kept, self._complete),
        )

    def _complete(self) -> None:
        self.completed += 1

    async def begin(self, *headers: tuple[bytes, bytes], status: int = 200) -> None:
        message = {"type": "http.response.start", "status": status, "headers": headers}
        await self.cycle.send(message)

    async def go_on(self, body: bytes, *, more: bool = False) -> None:
        message = {"type": "http.response.body", "body": body, "more_body": more}
        await self.cycle.send(message)

    @property
    def written(self) -> bytes:
        return b"".join(self.wire.written)


async def test_a_body_of_a_known_length_goes_out_as_it_is() -> None:
    answer = Answer()
    await answer.begin(LENGTH, (b"X-Named", b"tab\t\xff"))
    await answer.go_on(b"bo", more=True)
    await answer.go_on(b"dy")
    head = b"HTTP/1.1 200 OK\r\ndate: today\r\ncontent-length: 4\r\nx-named: tab\t\xff\r\n\r\n"
    assert answer.written == head + b"body"
    assert answer.completed == 1 and not answer.wire.is_closed
    with pytest.raises(RuntimeError, match="may not come"):
        await answer.go_on(b"more")


async def test_a_body_without_a_length_goes_out_in_chunks() -> None:
    answer = Answer()
    await answer.begin()
    for part, more in ((b"ab", True), (b"", True), (b"", False)):
        await answer.go_on(part, more=more)
    assert answer.written.endswith(b"\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    ("said", "is_kept"), [((b"connection", b"Close"), True), (None, False), ((b"x", b"y"), False)]
)
async def test_a_connection_that_ends_says_so_once(
    said: tuple[bytes, bytes] | None, is_kept: bool
) -> None:
    answer = Answer(is_kept=is_kept)
    await answer.begin((b"content-length", b"0"), *([said] if said else []))
    await answer.go_on(b"")
    assert answer.written.lower().count(b"connection: close") == 1
    assert answer.wire.is_closed and answer.completed == 1


async def test_head_and_204_have_no_body() -> None:
    answer = Answer("HEAD")
    await answer.begin(LENGTH)
    await answer.go_on(b"")
    assert b"content-length: 4" in answer.written and answer.written.endswith(b"\r\n\r\n")
    answer = Answer()
    await answer.begin(status=204)
    await answer.go_on(b"")
    assert b"chunked" not in answer.written and answer.completed == 1


@pytest.mark.parametrize("value", [b"a\r\nb: c", b"a\nb", b"a\x00", b"\x7f", b"a\x1f"])
async def test_a_value_cannot_begin_another_header(value: bytes) -> None:
    answer = Answer()
    with pytest.raises(RuntimeError, match="control character"):
        await answer.begin((b"x-named", value))
    assert answer.written == b""


@pytest.mark.parametrize("name", [b"a b", b"a:", b"a\r\nb", b"\x00", b"a\x7f"])
async def test_a_name_is_one(name: bytes) -> None:
    answer = Answer()
    for _ in range(2):
        answer.cycle.response_started = False
        with pytest.raises(RuntimeError, match="name of a header"):
            await answer.begin((name, b"value"))


@pytest.mark.parametrize("body", [b"bod", b"body."])
async def test_a_body_is_as_long_as_its_length_says(body: bytes) -> None:
    answer = Answer()
    await answer.begin(LENGTH)
    with pytest.raises(RuntimeError, match="Content-Length"):
        await answer.go_on(body)
