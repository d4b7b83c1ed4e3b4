"""kill -9 of a gateway with two hundred streams open: each is billed at its last checkpoint, the
rest is the house's, and the tenant gets none of its budget back for it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import msgspec
import pytest
import redis

from gateway.home import Home
from gateway.inference.attempt import CHECKPOINT_TOKENS
from gateway.limits.output_forecast import UNKNOWN_OUTPUT_TOKENS
from gateway.principal import DAY_US
from gateway.processes import embedded_databases as embedded
from tests.chaos.load import billed, body
from tests.chaos.test_kills import balance
from tests.stack import Stack, running

pytestmark = pytest.mark.slow

STREAMS = 200
TOKENS_PER_DAY = 1_000_000
"""As a limit of batches, it refills so slowly that what was taken of it can be read."""
CONFIG = f"""
[engine]
max_num_seqs = 256
batch_max_share = 1.0
batch_kv_headroom = 0.0
[plan.default]
[plan.night]
lane = "batch"
batch_tokens_per_day = {TOKENS_PER_DAY}
max_concurrent_streams = 256
"""
BEGIN_TIMEOUT_S = 90.0
SLACK_TOKENS = 100
"""Covers tokens that refill while two hundred streams are admitted, and the rounding of each."""
KEPT = 0.05
"""`ledger.lua` keeps 64 marks of a bucket's past: of more leases that are open at once it cannot
tell all apart, and keeps some of what they give back."""


class Stream:
    """One request on a connection of its own, and how many events came of it."""

    def __init__(self, stack: Stack, key: str, number: int) -> None:
        words = f"Tell me the story of bridge number {number}."
        content = json.dumps(body(words, max_tokens=3000, stream=True)).encode()
        self.port = stack.port
        self.request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n%b"
            % (key.encode(), len(content), content)
        )
        self.head = b""
        self.num_events = 0

    async def read(self) -> None:
        """Until the server is gone."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(self.request)
        try:
            self.head = await reader.readuntil(b"\r\n\r\n")
            while data := await reader.read(1 << 16):
                self.num_events += data.count(b"data: {")
        except ConnectionError:
            pass  # a reset is an end as well
        finally:
            writer.close()


async def until_all_have_checkpoints(streams: list[Stream]) -> None:
    async with asyncio.timeout(BEGIN_TIMEOUT_S):
        while not all(stream.num_events > 2 * CHECKPOINT_TOKENS for stream in streams):
            await asyncio.sleep(0.1)


def missing_of_the_day(stack: Stack, key_id: str, *, since_us: int) -> float:
    """Tokens that Redis has taken of the key's bucket since it was full."""
    with redis.Redis.from_url(embedded.redis_url(Home(stack.home))) as store:
        (name,) = store.keys(f"tollgate:{{*}}:key:{key_id}")
        scope: dict[str, Any] = msgspec.msgpack.decode(store.get(name))
    full_at_us: float = scope["b"]["d"]["f"]
    return (full_at_us - since_us) * TOKENS_PER_DAY / DAY_US


def time_us(stack: Stack) -> int:
    with redis.Redis.from_url(embedded.redis_url(Home(stack.home))) as store:
        seconds, microseconds = store.time()
    return int(seconds) * 1_000_000 + int(microseconds)


async def kill_amid(stack: Stack, streams: list[Stream]) -> None:
    reading = [asyncio.create_task(stream.read()) for stream in streams]
    await until_all_have_checkpoints(streams)
    assert await asyncio.to_thread(stack.open_leases) == STREAMS
    (worker,) = stack.pids("gateway", "worker")
    os.kill(worker, signal.SIGKILL)
    await asyncio.gather(*reading)


async def test_a_killed_gateway_gives_nothing_away_of_two_hundred_streams() -> None:
    with running(config=CONFIG) as stack:
        made = json.loads(
            stack.run("keys", "create", "--json", "--name", "night", "--plan", "night")
        )
        began_us = time_us(stack)
        streams = [Stream(stack, made["key"], number) for number in range(STREAMS)]
        await kill_amid(stack, streams)
        stack.wait_ready()
        client = stack.client(api_key=made["key"], max_retries=0)
        again = await asyncio.to_thread(
            client.chat.completions.create,
            model="penny",
            messages=[{"role": "user", "content": "Are you there again?"}],
            max_tokens=30,
            extra_body={"ignore_eos": True},
        )
        await balance(stack)
        rows = await stack.sql(
            "SELECT finish, output, uncached_input + cache_read AS input FROM usage_events "
            "WHERE kind = 'usage'"
        )
        recovered = [row for row in rows if row.finish == "recovered"]
        assert len(recovered) == STREAMS
        assert all(row.output > 0 and row.input > 0 for row in recovered)
        assert again.usage is not None and again.usage.completion_tokens == 30
        assert [row.output for row in rows if row.finish == "done"] == [30]
        assert await billed(stack, "waste") > 0, "what came after the last checkpoint"
        used = sum(row.input + row.output for row in rows)
        missing = missing_of_the_day(stack, made["id"], since_us=began_us)
        unused = STREAMS * UNKNOWN_OUTPUT_TOKENS - used
        assert used - SLACK_TOKENS <= missing <= used + SLACK_TOKENS + KEPT * unused
        assert stack.run("reconcile") == "The books balance.\n"
