"""Clients that leave at random, and kill -9 of the engine, of Postgres and of the parent under load
(`test_killed_gateway` kills gateways, `test_redis_killed` Redis): what was acknowledged is billed
once, nothing twice, nothing lost. What comes back is the next test's: first those that count every
token since the engine's start, then those that end an engine."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.chaos.load import (
    Seen,
    billed,
    body,
    check_books,
    client,
    hang_up,
    read_stream,
    wait_idle,
    words,
)
from tests.stack import Stack, running

pytestmark = pytest.mark.slow

HUNG_AFTER_S = 4.0
"""As `step_timeout_s`: short for a test, and still long for a step of penny's."""
NUM_TOKENS = 500
IMPATIENT = f"[engine]\nstep_timeout_s = {HUNG_AFTER_S}\n"


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Start one worker, which knows the key once it was asked: then it needs no Postgres."""
    with running() as started:
        yield started


@pytest.fixture(scope="module")
def pair() -> Iterator[Stack]:
    """Start two workers: one serves while the other is replaced."""
    with running(workers=2) as started:
        yield started


@pytest.fixture(scope="module")
def impatient() -> Iterator[Stack]:
    """Start an engine that is soon taken for hung, as a busy one would be in all other tests."""
    with running(config=IMPATIENT) as started:
        yield started


async def of_earlier_engines(stack: Stack) -> int:
    """Return how many billed tokens the running engine does not count: another one made them."""
    await asyncio.to_thread(wait_idle, stack)
    total = await billed(stack, "usage") + await billed(stack, "waste")
    return total - int(stack.metric("tollgate_generation_tokens"))


async def balance(stack: Stack, earlier: int = 0) -> None:
    """Every token the engine generated is on somebody's bill or in the house's waste account.
    `earlier`: see `of_earlier_engines`."""
    await asyncio.to_thread(wait_idle, stack)
    generated = int(stack.metric("tollgate_generation_tokens")) + earlier
    deadline = time.monotonic() + 60
    while (total := await billed(stack, "usage") + await billed(stack, "waste")) != generated:
        assert time.monotonic() < deadline, f"{total} of {generated} tokens are accounted for"
        await asyncio.sleep(0.25)
    await check_books(stack)


async def signal_amid_streams(
    stack: Stack, http: httpx.AsyncClient, rng: random.Random, number: signal.Signals
) -> tuple[int, float, list[asyncio.Task[Seen]]]:
    """The engine's process, signalled while it serves four streams; since when; what they see."""
    generated = stack.metric("tollgate_generation_tokens")
    streams = [
        asyncio.create_task(read_stream(http, words(rng), max_tokens=NUM_TOKENS)) for _ in range(4)
    ]
    is_amid = lambda: stack.metric("tollgate_generation_tokens") > generated + 40  # noqa: E731
    await asyncio.to_thread(stack.wait, "they are amid it", is_amid)
    (engine,) = stack.pids("-m engine --")
    os.kill(engine, number)
    return engine, time.monotonic(), streams


async def check_resumed(streams: list[asyncio.Task[Seen]]) -> None:
    for seen in await asyncio.gather(*streams):
        assert (seen.status, seen.done, seen.error) == (200, True, None)
        assert seen.completion_tokens == NUM_TOKENS


async def resumed(stack: Stack) -> list[Any]:
    """Bills of what was delivered before an engine was lost, the oldest first."""
    return await stack.sql(
        "SELECT output FROM usage_events WHERE finish = 'failover' AND kind = 'usage' ORDER BY id"
    )


async def num_events(stack: Stack) -> int:
    ((events, ids),) = await stack.sql("SELECT count(*), count(DISTINCT id) FROM usage_events")
    assert events == ids
    return int(events)


async def test_sixty_four_streams_and_sixty_four_whole_requests_leave_at_random(
    stack: Stack,
) -> None:
    """Every token generated before the abort is billed once, and nothing stays held."""
    rng = random.Random(2)
    earlier, num_before = await of_earlier_engines(stack), await num_events(stack)
    wasted = await billed(stack, "waste")
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
    await balance(stack, earlier)
    assert await billed(stack, "waste") == wasted
    assert await num_events(stack) - num_before <= 128
    told = [s.completion_tokens for s in [*streams, *wholes] if s.completion_tokens is not None]
    assert all(tokens == 80 for tokens in told)


async def test_a_killed_postgres_costs_no_request_and_no_event(stack: Stack) -> None:
    rng, seen = random.Random(4), []
    earlier, before = await of_earlier_engines(stack), await billed(stack, "usage")
    async with client(stack) as http:
        seen.append(await read_stream(http, words(rng), max_tokens=10))

        async def load() -> None:
            while time.monotonic() < until:
                seen.append(await read_stream(http, words(rng), max_tokens=20))

        until = time.monotonic() + 7
        clients = [asyncio.create_task(load()) for _ in range(4)]
        while time.monotonic() < until - 2:
            for pid in stack.pids("postgres", "-D"):
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.2)
        await asyncio.gather(*clients)
    assert all(one.done and one.status == 200 for one in seen)
    stack.wait("Postgres is back", lambda: bool(stack.pids("postgres", "-D")))
    await balance(stack, earlier)
    assert await billed(stack, "usage") - before == sum(one.completion_tokens or 0 for one in seen)


@pytest.mark.nightly
async def test_a_rolling_restart_under_load_drops_no_stream(pair: Stack) -> None:
    rng = random.Random(6)
    before = set(pair.pids("gateway", "worker"))
    assert pair.process is not None

    seen: list[Seen] = []

    async def load() -> None:
        while not replaced.is_set():
            async with client(pair) as http:
                seen.append(await read_stream(http, words(rng), max_tokens=60))

    replaced = asyncio.Event()
    clients = [asyncio.create_task(load()) for _ in range(6)]
    await asyncio.sleep(2)
    pair.process.send_signal(signal.SIGHUP)
    are_new = lambda: not before & set(pair.pids("gateway", "worker"))  # noqa: E731
    await asyncio.to_thread(pair.wait, "all workers are new", are_new, 60.0)
    replaced.set()
    await asyncio.gather(*clients)
    assert len(seen) > 6
    # A connection that was accepted and let go before it carried a request is no stream: every
    # HTTP client repeats what was never sent, the official SDK among them.
    begun = [one for one in seen if one.status]
    assert [one for one in begun if not one.done] == []
    assert len(seen) - len(begun) <= len(before), "at most one such race for each worker that left"
    await balance(pair)


async def test_a_killed_engine_comes_back_and_its_streams_go_on(stack: Stack) -> None:
    await asyncio.to_thread(wait_idle, stack)
    rng, before = random.Random(5), len(await resumed(stack))
    used = await billed(stack, "usage")
    async with client(stack) as http:
        _, _, streams = await signal_amid_streams(stack, http, rng, signal.SIGKILL)
        is_away = lambda: httpx.get(f"{stack.base_url}/health/ready").status_code == 503  # noqa: E731
        await asyncio.to_thread(stack.wait, "it is away", is_away)
        away = await http.post(
            "/v1/chat/completions",
            json={"model": "penny", "messages": [{"role": "user", "content": "Hi"}]},
        )
        assert away.status_code == 503
        assert int(away.headers["retry-after"]) >= 1
        await check_resumed(streams)
    await asyncio.to_thread(wait_idle, stack)
    rows = (await resumed(stack))[before:]
    assert len(rows) == 4 and all(row.output > 0 for row in rows)
    assert await billed(stack, "usage") - used == 4 * NUM_TOKENS
    assert stack.run("reconcile") == "The books balance.\n", "what the dead one had counted, too"


async def test_an_engine_that_dies_before_the_first_token_is_asked_again_when_it_is_back(
    stack: Stack,
) -> None:
    """Stopped, it has the requests and says nothing; killed, it is started again. Neither client
    hears of it, and each is billed once."""
    await asyncio.to_thread(wait_idle, stack)
    before, wasted = await billed(stack, "usage"), await billed(stack, "waste")
    async with client(stack) as http:
        (engine,) = stack.pids("-m engine --")
        os.kill(engine, signal.SIGSTOP)
        streamed = asyncio.create_task(read_stream(http, "Hello", max_tokens=7))
        whole = asyncio.create_task(
            http.post("/v1/chat/completions", json=body("Hello", max_tokens=7, stream=False))
        )
        has_both = lambda: stack.open_leases() == 2  # noqa: E731
        await asyncio.to_thread(stack.wait, "the engine has both", has_both)
        os.kill(engine, signal.SIGKILL)
        seen, answer = await streamed, await whole
    assert (seen.status, seen.done, seen.error, seen.completion_tokens) == (200, True, None, 7)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 7
    assert stack.pids("-m engine --") != [engine]
    await asyncio.to_thread(wait_idle, stack)
    used = 2 * int(answer.json()["usage"]["completion_tokens"])
    assert await billed(stack, "usage") - before == used
    assert await billed(stack, "waste") == wasted
    await check_books(stack)


@pytest.mark.nightly
def test_a_killed_parent_leaves_nothing_behind_after_the_next_start(stack: Stack) -> None:
    first = stack.client().chat.completions.create(
        model="penny", messages=[{"role": "user", "content": "Hello"}], max_tokens=5
    )
    children = stack.kill()
    assert len(children) >= 4
    stack.start()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
    again = stack.client().chat.completions.create(
        model="penny", messages=[{"role": "user", "content": "Hello"}], max_tokens=5
    )
    assert again.choices[0].message.role == first.choices[0].message.role


async def until_given_up(stack: Stack) -> None:
    def is_given_up() -> bool:
        ready = httpx.get(f"{stack.base_url}/health/ready")
        return ready.status_code == 503 and ready.json()["missing"] == ["replicas"]

    await asyncio.to_thread(stack.wait, "it is given up", is_given_up)


@pytest.mark.nightly
async def test_an_engine_that_goes_on_in_time_is_not_killed(impatient: Stack) -> None:
    """Its streams go on at itself; what it generated for them before and nobody took is the
    house's."""
    rng, stack = random.Random(9), impatient
    earlier = await of_earlier_engines(stack)
    async with client(stack) as http:
        engine, _, streams = await signal_amid_streams(stack, http, rng, signal.SIGSTOP)
        await until_given_up(stack)
        os.kill(engine, signal.SIGCONT)
        await check_resumed(streams)
    assert stack.pids("-m engine --") == [engine]
    await balance(stack, earlier)


@pytest.mark.nightly
async def test_a_hung_engine_is_given_up_killed_and_replaced(impatient: Stack) -> None:
    """SIGSTOP closes no socket and ends no process: only its silence tells."""
    rng, stack = random.Random(8), impatient
    before = len(await resumed(stack))
    async with client(stack) as http:
        engine, stopped, streams = await signal_amid_streams(stack, http, rng, signal.SIGSTOP)
        await until_given_up(stack)
        noticed_s = time.monotonic() - stopped
        away = await http.post("/v1/chat/completions", json=body("Hi", max_tokens=5, stream=False))
        assert HUNG_AFTER_S * 0.8 < noticed_s < HUNG_AFTER_S + 30
        assert away.status_code == 503
        assert int(away.headers["retry-after"]) >= 1
        stack.wait("the hung one is gone", lambda: engine not in stack.pids("-m engine --"))
        assert time.monotonic() - stopped > 1.5 * HUNG_AFTER_S, "it had its chance to go on"
        await check_resumed(streams)
    await asyncio.to_thread(wait_idle, stack)
    rows = (await resumed(stack))[before:]
    assert len(rows) == 4 and all(row.output > 0 for row in rows)
    await check_books(stack)
    assert len(stack.pids("-m engine --")) == 1
