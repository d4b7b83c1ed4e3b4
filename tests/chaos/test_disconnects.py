"""Clients leave at random; every token generated before the abort is billed once, and nothing stays
held."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.chaos.load import billed, check_books, client, hang_up, read_stream, wait_idle, words
from tests.stack import Stack

pytestmark = pytest.mark.slow


async def test_sixty_four_streams_and_sixty_four_whole_requests_leave_at_random(
    stack: Stack,
) -> None:
    rng = random.Random(2)
    async with client(stack) as http:
        streams = await asyncio.gather(
            *(
                read_stream(
                    http,
                    words(rng),
                    max_tokens=80,
                    leave_after=rng.choice([None, 1, 2, rng.randrange(3, 60)]),
                )
                for _ in range(64)
            )
        )
        wholes = await asyncio.gather(
            *(
                hang_up(http, words(rng), max_tokens=80, after_s=rng.uniform(0.01, 3.0))
                for _ in range(64)
            )
        )
    assert {seen.status for seen in streams} == {200}
    assert any(not seen.done for seen in wholes), "somebody hung up"
    await asyncio.to_thread(wait_idle, stack)
    generated = stack.metric("tollgate_generation_tokens")
    assert generated > 0
    assert await billed(stack, "usage") == generated
    assert await billed(stack, "waste") == 0
    ((events, ids),) = await stack.sql("SELECT count(*), count(DISTINCT id) FROM usage_events")
    assert events == ids <= 128
    told = [s.completion_tokens for s in [*streams, *wholes] if s.completion_tokens is not None]
    assert all(tokens == 80 for tokens in told)
    await check_books(stack)
