"""kill -9 of engines that decode, right after one that computes prompts has handed a stream over to
them: the text is that of engines which live, and each token is on one bill."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.chaos.load import billed, client, wait_idle
from tests.chaos.test_resumed_text import ReadStream, note
from tests.stack import Stack, running

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1800)]

KILLS = 12
NUM_BESIDE = 6
"""Streams that decode beside, so that a prompt is worth computing elsewhere."""
CONFIG = """
[[model]]
name = "penny"
path = "models/penny"
prefill = 1
decode = 2
[model.engine_options]
deterministic = true
[fleet]
max_resumes = 20
"""
LONG = "Tell me of these bridges: " + " ".join(f"bridge {number}," for number in range(150))
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"seed": 5, "temperature": 1.2},
    "penalised": {"seed": 6, "temperature": 1.0, "frequency_penalty": 1.0, "top_p": 0.9},
}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running(config=CONFIG) as started:
        yield started


async def ask(http: httpx.AsyncClient, number: int, found: ReadStream) -> ReadStream:
    """Ask something that nobody has asked before this number was used."""
    name = sorted(REQUESTS)[number % len(REQUESTS)]
    body = {
        "model": "penny",
        "messages": [{"role": "user", "content": f"Number {number}. {LONG}"}],
        "max_tokens": 100,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **REQUESTS[name],
    }
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            found.num_resumed += line == ": resumed"
            if line == "data: [DONE]":
                found.is_done = True
            elif line.startswith("data: "):
                note(found, json.loads(line[6:]))
    return found


@asynccontextmanager
async def others(http: httpx.AsyncClient, used: list[int]) -> Any:
    """Let streams of other clients decode meanwhile; what they used is added to `used`."""
    is_over = False

    async def decode(number: int) -> None:
        while not is_over:
            body = {
                "model": "penny",
                "messages": [{"role": "user", "content": f"Count, {number}."}],
                "max_tokens": 200,
                "ignore_eos": True,
            }
            answer = await http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            used.append(answer.json()["usage"]["completion_tokens"])

    async with asyncio.TaskGroup() as group:
        for number in range(NUM_BESIDE):
            group.create_task(decode(number))
        try:
            yield
        finally:
            is_over = True


async def test_a_stream_goes_on_whose_decode_engine_dies_at_once(stack: Stack) -> None:
    rng, used, num_resumed = random.Random(4), list[int](), 0
    async with client(stack) as http:
        async with others(http, used):
            exact = [await ask(http, number, ReadStream()) for number in range(KILLS)]
        assert all(each.is_done for each in exact)
        await asyncio.to_thread(wait_idle, stack)
        used.clear()
        before = await billed(stack, "usage")
        first = {*stack.pids("-m engine --", "engine-0.sock")}
        assert len(first) == 1
        async with others(http, used):
            for number in range(KILLS):
                found = ReadStream()
                stream = asyncio.create_task(ask(http, number, found))
                async with asyncio.timeout(90):
                    while not found.num_chars:
                        await asyncio.sleep(0.001)
                decode = [each for each in stack.pids("-m engine --") if each not in first]
                victims = decode if number % 3 == 2 else rng.sample(decode, 1)
                for pid in victims:
                    os.kill(pid, signal.SIGKILL)
                await stream
                num_resumed += found.num_resumed
                used.append(found.completion_tokens)
                found.num_resumed = 0
                assert found == exact[number]
                all_there = lambda: len(stack.pids("-m engine --")) == 3  # noqa: E731
                await asyncio.to_thread(stack.wait, "it is started again", all_there)
    assert stack.metric("tollgate_fleet_routes_total", reason="split") >= KILLS / 2
    assert num_resumed >= 1
    await asyncio.to_thread(wait_idle, stack)
    assert await billed(stack, "usage") - before == sum(used)
    assert stack.run("reconcile") == "The books balance.\n"
