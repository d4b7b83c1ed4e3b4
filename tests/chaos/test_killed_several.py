"""kill -9 of the gateway, then of the engine, while requests of several prompts and of several
choices run: each is one attempt, billed once as its record says, the rest is the house's, and
nothing stays reserved."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import httpx
import msgspec
import pytest

from tests.chaos.load import billed, client, wait_idle
from tests.chaos.test_kills import balance
from tests.stack import Stack

pytestmark = pytest.mark.slow

BEGIN_TIMEOUT_S = 60.0
BEGUN_TOKENS = 120
"""A stream has made several checkpoints by then; the first may know of its first prompt alone."""
MAX_HELD_BACK = 4
"""Tokens of a choice that came, and are parts of a character that is still to come."""
PROMPTS = ["Tell me of bridges.", "Count.", "Tell me of bridges, and of what is below them."]
LONG = {"model": "penny", "max_tokens": 1500, "ignore_eos": True}
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
WORDS: Any = [{"role": "user", "content": PROMPTS[0]}]
STREAMS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETION, {"prompt": PROMPTS, "logprobs": 0}),
    (COMPLETION, {"prompt": PROMPTS[:2], "n": 2, "logprobs": 0}),
    (CHAT, {"messages": WORDS, "n": 3, "logprobs": True}),
]
WHOLE = (COMPLETION, {"prompt": PROMPTS, "n": 2})


class Reading(msgspec.Struct):
    """The part of one stream that a client has."""

    tokens: dict[int, int]
    """By choice."""
    request_id: str = ""
    error: dict[str, Any] | None = None

    async def read(self, http: httpx.AsyncClient, path: str, asked: dict[str, Any]) -> None:
        """Until it ends, or its server is gone."""
        body = {**LONG, **asked, "stream": True}
        try:
            async with http.stream("POST", path, json=body) as answer:
                assert answer.status_code == 200
                self.request_id = answer.headers["x-request-id"]
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        self.note(json.loads(line.removeprefix("data: ")))
        except httpx.TransportError:
            pass  # it was cut off

    def note(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = chunk["error"]
            return
        for choice in chunk["choices"]:
            told = choice["logprobs"] or {}
            here = len(told.get("tokens") or told.get("content") or ())
            self.tokens[choice["index"]] = self.tokens.get(choice["index"], 0) + here

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens.values())


async def killed_amid(stack: Stack, *words: str) -> list[Reading]:
    """The process, once all prompts of all streams were read and a checkpoint says so; what its
    clients had."""
    found = [Reading({}) for _ in STREAMS]
    async with client(stack) as http:
        path, asked = WHOLE
        whole = asyncio.create_task(http.post(path, json={**LONG, **asked}))
        reading = [
            asyncio.create_task(each.read(http, *how))
            for each, how in zip(found, STREAMS, strict=True)
        ]
        async with asyncio.timeout(BEGIN_TIMEOUT_S):
            while not all(each.num_tokens >= BEGUN_TOKENS for each in found):
                await asyncio.sleep(0.05)
        (pid,) = stack.pids(*words)
        os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*reading)
        (ended,) = await asyncio.gather(whole, return_exceptions=True)
    assert isinstance(ended, httpx.TransportError) or ended.status_code >= 500
    return found


async def bills(stack: Stack, finish: str) -> dict[str, Any]:
    """By request, of those that pay for anything."""
    rows = await stack.sql(
        "SELECT request_id, output, uncached_input + cache_read AS input FROM usage_events "
        f"WHERE kind = 'usage' AND finish = '{finish}' AND output > 0"
    )
    found = {row.request_id: row for row in rows}
    assert len(found) == len(rows), "one event each"
    return found


async def prompt_tokens(stack: Stack) -> list[int]:
    async with client(stack) as http:
        answers = [
            await http.post(path, json={"model": "penny", **asked, "max_tokens": 1})
            for path, asked in STREAMS
        ]
    return [answer.json()["usage"]["prompt_tokens"] for answer in answers]


@pytest.mark.nightly
async def test_what_runs_in_one_request_is_one_bill_whoever_is_killed(stack: Stack) -> None:
    readings = await killed_amid(stack, "gateway", "worker")
    stack.wait_ready()
    await balance(stack)
    recovered = await bills(stack, "recovered")
    assert recovered.keys() == {each.request_id for each in readings}
    asked = await prompt_tokens(stack)
    for each, num_asked in zip(readings, asked, strict=True):
        bill = recovered[each.request_id]
        assert bill.input == num_asked
        assert 0 < bill.output <= each.num_tokens, "what was sent at the last checkpoint"
    assert await billed(stack, "waste") > 0, "what came after it, and what nobody got a byte of"

    readings = await killed_amid(stack, "-m engine --")
    stack.wait_ready()
    await asyncio.to_thread(wait_idle, stack)
    failed = await bills(stack, "error")
    assert failed.keys() == {each.request_id for each in readings}
    for each, num_asked in zip(readings, asked, strict=True):
        assert each.error is not None and each.error["type"] == "server_error"
        bill = failed[each.request_id]
        assert bill.input == num_asked
        held_back = MAX_HELD_BACK * len(each.tokens)
        assert each.num_tokens <= bill.output <= each.num_tokens + held_back
    assert await bills(stack, "recovered") == recovered
    assert stack.run("reconcile") == "The books balance.\n"
