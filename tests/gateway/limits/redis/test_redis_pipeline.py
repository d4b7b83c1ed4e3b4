"""Commands share writes, never answers; a Redis that is away is away for all of them."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio
from redis.exceptions import RedisError, ResponseError

from gateway.limits.redis import pipeline
from gateway.limits.redis.pipeline import MAX_QUEUED, Pipeline, QueueFull
from tests.pace import within


@pytest.fixture(scope="module")
def patient_with_stores() -> None:
    """Nobody waits longer than in a product."""


async def test_each_gets_its_own_answer(redis: redis.asyncio.Redis) -> None:
    made = Pipeline(redis)
    echoes = [made.call((b"ECHO", str(number))) for number in range(1000)]
    assert await asyncio.gather(*echoes) == [str(number).encode() for number in range(1000)]
    assert len(redis.connection_pool._in_use_connections) == 1


async def test_a_command_that_fails_fails_alone(redis: redis.asyncio.Redis) -> None:
    made = Pipeline(redis)
    calls = [made.call((b"ECHO", b"x") if i % 3 else (b"NOSUCH", b"x")) for i in range(30)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for number, answer in enumerate(answers):
        assert answer == b"x" if number % 3 else isinstance(answer, ResponseError)


async def test_commands_that_are_called_together_are_answered_together(
    redis: redis.asyncio.Redis,
) -> None:
    made = Pipeline(redis)
    many = [(b"ECHO", str(number)) if number % 7 else (b"NOSUCH", b"x") for number in range(200)]
    alone = asyncio.create_task(made.call((b"ECHO", b"alone")))
    answers = await made.call_all(many)
    assert await alone == b"alone"
    for number, answer in enumerate(answers):
        assert answer == str(number).encode() if number % 7 else isinstance(answer, ResponseError)
    assert await made.call_all([]) == []
    left = asyncio.create_task(made.call_all(many))
    await asyncio.sleep(0)
    left.cancel()
    assert await made.call((b"ECHO", b"after")) == b"after"
    with pytest.raises(QueueFull):
        await made.call_all([(b"ECHO", b"x")] * (MAX_QUEUED + 1))


async def test_who_has_left_shifts_nobodys_answer(redis: redis.asyncio.Redis) -> None:
    made = Pipeline(redis)
    tasks = [asyncio.create_task(made.call((b"ECHO", str(number)))) for number in range(50)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    for number, answer in enumerate(answers):
        assert isinstance(answer, asyncio.CancelledError) or answer == str(number).encode()
    assert all(answers[number] == str(number).encode() for number in range(1, 50, 2))


async def test_a_redis_that_does_not_answer_is_away_for_all_who_wait(
    redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "BATCH_TIMEOUT_S", 0.2)
    monkeypatch.setattr(pipeline, "MAX_BATCH", 4)
    made = Pipeline(redis)
    stuck = [asyncio.create_task(made.call((b"BLPOP", f"nothing-{i}", b"0"))) for i in range(2)]
    waiting = [asyncio.create_task(made.call((b"ECHO", b"x"))) for _ in range(40)]
    answers = await asyncio.gather(*stuck, *waiting, return_exceptions=True)
    assert all(isinstance(each, RedisError | OSError) for each in answers[:2])
    assert await made.call((b"ECHO", b"again")) == b"again"


async def test_a_queue_too_long_takes_no_more(redis: redis.asyncio.Redis) -> None:
    made = Pipeline(redis)
    calls = [asyncio.create_task(made.call((b"ECHO", b"x"))) for _ in range(MAX_QUEUED)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await made.call((b"ECHO", b"x"))
    assert set(await asyncio.gather(*calls)) == {b"x"}


async def test_a_caller_whose_connecting_is_cancelled_is_told(
    redis: redis.asyncio.Redis,
) -> None:
    made = Pipeline(redis)
    call = asyncio.create_task(made.call((b"ECHO", b"x")))
    await asyncio.sleep(0)
    assert made._connecting is not None
    made._connecting.cancel()
    with pytest.raises(ConnectionAbortedError):
        await call
    assert await made.call((b"ECHO", b"again")) == b"again"


async def test_a_lost_connection_fails_who_waits_and_is_replaced(
    redis: redis.asyncio.Redis,
) -> None:
    made = Pipeline(redis)
    number = await made.call((b"CLIENT", b"ID"))
    stuck = asyncio.create_task(made.call((b"BLPOP", b"nothing", b"0")))
    await asyncio.sleep(0.05)
    await redis.client_kill_filter(_id=number)
    with pytest.raises(RedisError):
        await stuck
    assert await made.call((b"CLIENT", b"ID")) != number
    assert len(redis.connection_pool._in_use_connections) == 1


async def test_who_closes_redis_does_not_wait_for_it(redis: redis.asyncio.Redis) -> None:
    made = Pipeline(redis)
    stuck = asyncio.create_task(made.call((b"BLPOP", b"nothing", b"0")))
    async with asyncio.timeout(30):
        while made._wire is None:
            await asyncio.sleep(0.001)
    async with within(1.0):
        await redis.connection_pool.disconnect()
    with pytest.raises(RedisError):
        await stuck


async def test_a_connection_that_breaks_while_it_is_made_fails_who_waits(
    redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def breaks() -> None:
        raise AttributeError("'NoneType' object has no attribute 'writelines'")

    made = Pipeline(redis)
    monkeypatch.setattr(redis.connection_pool, "get_connection", breaks)
    with pytest.raises(RedisError, match="not connected"):
        await made.call((b"PING",))
    monkeypatch.undo()
    assert await made.call((b"PING",)) == b"PONG"
