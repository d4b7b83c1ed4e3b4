"""Runs scripted upstreams in a thread of their own, for a Tollgate that stands in front of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
import openai
import psutil
from openai import OpenAI

from bench.tools.ports import free_port
from tests.gateway.fleet.upstream.scripted_upstream import (
    USAGE,
    Exchange,
    Script,
    Upstream,
    chunk,
    completion,
    good_stream,
)
from tests.stack import Stack

HELLO: Any = [{"role": "user", "content": "Say hello to the world."}]
T = TypeVar("T")
CALL_TIMEOUT_S = 30.0


class LiveUpstream:
    """One OpenAI-compatible server on a port of its own; `close` and `open` it as often as wanted.

    A test sets `script` before it makes a request, and reads `exchanges` after the answer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.port = free_port()
        self._loop = loop
        self._upstream = Upstream()
        self._server: asyncio.Server | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def exchanges(self) -> list[Exchange]:
        return self._upstream.exchanges

    def play(self, script: Script) -> None:
        """Answer with `script` from now on, and forget what was asked before."""
        self._upstream.exchanges.clear()
        self._upstream.script = script

    def open(self) -> None:
        self.call(self._open())

    def close(self) -> None:
        """Refuse connections; those that are open are cut."""
        self.call(self._close())

    def wait_left(self, exchange: Exchange, timeout_s: float) -> None:
        """Raises: TimeoutError if the client does not close the connection in time."""
        self.call(asyncio.wait_for(exchange.left.wait(), timeout_s))

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_TIMEOUT_S)

    async def _open(self) -> None:
        serve = self._upstream.serve
        self._server = await asyncio.start_server(serve, "127.0.0.1", self.port)

    async def _close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for writer in list(self._upstream.writers):
            writer.transport.abort()
        await self._server.wait_closed()
        while self._upstream.writers:
            await asyncio.sleep(0.01)
        self._server = None


@contextmanager
def live_upstreams(number: int) -> Iterator[list[LiveUpstream]]:
    """All open, in one thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="upstreams")
    thread.start()
    made = [LiveUpstream(loop) for _ in range(number)]
    try:
        for each in made:
            each.open()
        yield made
        for each in made:
            each.close()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def good_body(exchange: Exchange) -> None:
    await exchange.answer(completion())


async def good_text(exchange: Exchange) -> None:
    """Answer on OpenAI's older route."""
    choice = {"index": 0, "text": "Hello there", "logprobs": None, "finish_reason": "stop"}
    said = {
        **{"id": "cmpl-theirs", "object": "text_completion", "created": 7, "model": "x"},
        **{"choices": [choice], "usage": USAGE},
    }
    if not exchange.body.get("stream"):
        return await exchange.answer(said)
    await exchange.begin_stream()
    await exchange.send({**said, "usage": None}, {**said, "choices": []}, "[DONE]")
    await exchange.end_stream()


async def good_vectors(exchange: Exchange) -> None:
    given = exchange.body["input"]
    is_one = isinstance(given, str) or isinstance(given[0], int)
    vectors = [
        {"object": "embedding", "index": index, "embedding": [0.6, 0.8]}
        for index in range(1 if is_one else len(given))
    ]
    usage = {"prompt_tokens": 7, "total_tokens": 7}
    await exchange.answer({"object": "list", "data": vectors, "model": "x", "usage": usage})


async def good(exchange: Exchange) -> None:
    """Answer whatever is asked."""
    if exchange.target.endswith("/embeddings"):
        return await good_vectors(exchange)
    if not exchange.target.endswith("/chat/completions"):
        return await good_text(exchange)
    await (good_stream if exchange.body.get("stream") else good_body)(exchange)


async def holds_the_holder(exchange: Exchange) -> None:
    """Answers the user "holder" for as long as it stays, the others at once."""
    if exchange.body.get("user") != "holder":
        return await good(exchange)
    await exchange.begin_stream()
    await exchange.send(chunk("mine"))
    await exchange.hang()


async def dies_at_once(exchange: Exchange) -> None:
    exchange.writer.close()


async def sends_an_error_event(exchange: Exchange) -> None:
    """Repeats the key it was sent."""
    await exchange.begin_stream()
    message = f"no slot for {exchange.headers['authorization']}"
    await exchange.send({"error": {"message": message}})
    await exchange.end_stream()


def answers(status: int, message: str = "not now") -> Script:
    async def script(exchange: Exchange) -> None:
        await exchange.answer({"error": {"message": message}}, status, retry_after="2")

    return script


def ask(client: OpenAI, model: str, **options: Any) -> Any:
    return client.chat.completions.create(model=model, messages=HELLO, **options)


def text_of(answer: Any) -> str:
    if isinstance(answer, openai.Stream):
        return "".join(c.choices[0].delta.content or "" for c in answer if c.choices)
    return str(answer.choices[0].message.content)


def post(stack: Stack, **fields: Any) -> Any:
    """A streaming request without the SDK: a context that gives the response."""
    return httpx.stream(
        "POST",
        f"{stack.base_url}/v1/chat/completions",
        headers={"authorization": f"Bearer {stack.credentials['api_key']}"},
        json={"messages": HELLO, **fields},
        timeout=30,
    )


def askers(stack: Stack, upstream: LiveUpstream) -> set[int]:
    """Return the workers that have asked it since it plays what it plays."""
    ports = {exchange.writer.get_extra_info("peername")[1] for exchange in upstream.exchanges}
    return {
        pid
        for pid in stack.pids("gateway", "worker")
        if any(each.laddr.port in ports for each in psutil.Process(pid).net_connections("tcp"))
    }
