"""kill -9 of engines with a real model amid streams: the text is that of an engine which lives,
greedy, drawn, held to a schema or a call."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from tests.chaos.load import billed, client, wait_idle
from tests.stack import Stack, running

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(3600)]

KILLS = 30
CONFIG = """
[[model]]
name = "penny"
path = "models/penny"
replicas = 2
[model.engine_options]
deterministic = true
[fleet]
max_resumes = 20
"""
SCHEMA = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"type": "string"}, "minItems": 12, "maxItems": 12}
    },
    "required": ["names"],
    "additionalProperties": False,
}
TOOL = {"name": "note", "parameters": SCHEMA}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"seed": 5, "temperature": 1.2},
    "penalised": {"seed": 6, "temperature": 1.0, "frequency_penalty": 1.0, "top_p": 0.9},
    "two": {"seed": 7, "temperature": 1.0, "n": 2},
    "schema": {
        "seed": 8,
        "ignore_eos": False,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": SCHEMA, "strict": True},
        },
    },
    "call": {
        "seed": 9,
        "ignore_eos": False,
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": "required",
    },
}


class ReadStream(msgspec.Struct):
    texts: dict[int, str] = {}
    calls: str = ""
    ends: dict[int, str] = {}
    completion_tokens: int = 0
    num_resumed: int = 0
    is_done: bool = False

    @property
    def num_chars(self) -> int:
        return len(self.calls) + sum(map(len, self.texts.values()))


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running(config=CONFIG) as started:
        yield started


async def ask(http: httpx.AsyncClient, fields: dict[str, Any], found: ReadStream) -> ReadStream:
    body = {
        "model": "penny",
        "messages": [{"role": "user", "content": "Tell me of twelve bridges."}],
        "max_tokens": 300,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
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


def note(found: ReadStream, chunk: dict[str, Any]) -> None:
    assert "error" not in chunk, chunk
    for choice in chunk["choices"]:
        index, delta = choice["index"], choice["delta"]
        found.texts[index] = found.texts.get(index, "") + (delta.get("content") or "")
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            found.calls += (function.get("name") or "") + (function.get("arguments") or "")
        if choice["finish_reason"]:
            found.ends[index] = choice["finish_reason"]
    if chunk.get("usage"):
        found.completion_tokens = chunk["usage"]["completion_tokens"]


async def test_the_text_is_that_of_an_engine_that_lives(stack: Stack) -> None:
    rng, num_resumed, used = random.Random(3), 0, 0
    async with client(stack) as http:
        exact = {name: await ask(http, fields, ReadStream()) for name, fields in REQUESTS.items()}
        assert all(each.is_done for each in exact.values())
        await asyncio.to_thread(wait_idle, stack)
        before = await billed(stack, "usage")
        for _ in range(KILLS):
            names, read = rng.sample(sorted(REQUESTS), 4), [ReadStream() for _ in range(4)]
            streams = [
                asyncio.create_task(ask(http, REQUESTS[name], found))
                for name, found in zip(names, read, strict=True)
            ]
            wanted = rng.randrange(20, 1500)
            async with asyncio.timeout(90):
                while sum(each.num_chars for each in read) < wanted:
                    await asyncio.sleep(0.005)
            os.kill(rng.choice(stack.pids("-m engine --")), signal.SIGKILL)
            for name, found in zip(names, await asyncio.gather(*streams), strict=True):
                num_resumed, used = num_resumed + found.num_resumed, used + found.completion_tokens
                found.num_resumed = 0
                assert found == exact[name], name
            both = lambda: len(stack.pids("-m engine --")) == 2  # noqa: E731
            await asyncio.to_thread(stack.wait, "it is started again", both)
    assert num_resumed > KILLS / 2
    await asyncio.to_thread(wait_idle, stack)
    assert await billed(stack, "usage") - before == used
    assert stack.run("reconcile") == "The books balance.\n"
