"""Checks that what requests see of an upstream is kept: reachable, authorised, the last error."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.fleet.contact import Contact, ContactState, Observation
from gateway.fleet.errors import FleetError
from gateway.fleet.upstream.replica import UpstreamReplica
from gateway.generate_request import GenerateRequest
from tests.budget import examples
from tests.gateway.fleet.upstream.scripted_upstream import (
    API_KEY,
    Exchange,
    Script,
    Upstream,
    completion,
    good_stream,
    run,
)

Make = Callable[..., UpstreamReplica]
Chat = Callable[..., GenerateRequest]


def answers(status: int, message: str = "no") -> Script:
    async def script(exchange: Exchange) -> None:
        await exchange.answer({"error": {"message": message}}, status)

    return script


async def good_body(exchange: Exchange) -> None:
    await exchange.answer(completion())


async def breaks_off(exchange: Exchange) -> None:
    await exchange.begin_stream()
    exchange.writer.close()


async def ask(replica: UpstreamReplica, request: GenerateRequest) -> None:
    try:
        await run(replica, request)
    except FleetError:
        return


def seen(replica: UpstreamReplica) -> tuple[ContactState, bool | None, bool | None, str | None]:
    found = replica.contact.observation
    return found.state, found.reachable, found.authorised, found.last_error


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (answers(401), ("unauthorised", True, False, "answered 401")),
        (answers(403, "forbidden"), ("unauthorised", True, False, "answered 403")),
        (answers(402, "pay first"), ("unauthorised", True, False, "answered 402")),
        (answers(400, "Invalid API key"), ("unauthorised", True, False, "answered 400")),
        (answers(500), ("failing", True, None, "answered 500")),
        (answers(404, "no such model"), ("failing", True, None, "answered 404")),
        (answers(429), ("ok", True, True, "answered 429")),
        (answers(503), ("ok", True, True, "answered 503")),
        (answers(400, "messages is too long"), ("ok", True, True, None)),
        (good_body, ("ok", True, True, None)),
    ],
)
async def test_an_answer_tells_how_the_upstream_is(
    script: Script,
    expected: tuple[ContactState, bool | None, bool | None, str | None],
    upstream: Upstream,
    make_replica: Make,
    chat: Chat,
) -> None:
    replica = make_replica()
    assert seen(replica) == ("unknown", None, None, None)
    upstream.script = script
    await ask(replica, chat())
    assert seen(replica) == expected
    upstream.script = good_body
    await ask(replica, chat())
    assert seen(replica) == ("ok", True, True, expected[3]), "it recovers, and what was is kept"


async def test_one_that_refuses_connections_is_unreachable_and_comes_back(
    upstream: Upstream, make_replica: Make, chat: Chat
) -> None:
    replica = make_replica(base_url="http://127.0.0.1:1/v1")
    await ask(replica, chat())
    assert seen(replica)[:3] == ("unreachable", False, None)
    assert replica.contact.observation.last_error_at is not None


async def test_a_stream_that_breaks_off_is_a_failure_until_one_is_whole(
    upstream: Upstream, make_replica: Make, chat: Chat
) -> None:
    replica = make_replica()
    upstream.script = breaks_off
    await ask(replica, chat(stream=True))
    since = replica.contact.observation.since
    await ask(replica, chat(stream=True))
    assert seen(replica)[0] == "failing" and replica.contact.observation.since == since
    upstream.script = good_stream
    await ask(replica, chat(stream=True))
    assert seen(replica)[0] == "ok"


async def test_nothing_that_is_kept_tells_the_key_or_the_address(
    upstream: Upstream, make_replica: Make, chat: Chat
) -> None:
    replica = make_replica()
    upstream.script = answers(401, f"{API_KEY} of {upstream.base_url} is wrong")
    await ask(replica, chat())
    kept = repr(replica.contact.observation) + replica.identity
    assert API_KEY not in kept and "127.0.0.1" not in kept
    assert make_replica().identity == replica.identity
    assert make_replica(api_key="another").identity != replica.identity


class Sharing(RuleBasedStateMachine):
    """Two workers that see one upstream and hear of each other's observations, now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.workers = [Contact(clock=self.tick) for _ in range(2)]
        self.latest: ContactState = "unknown"

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    @rule(
        worker=st.integers(0, 1),
        state=st.sampled_from(["unreachable", "unauthorised", "failing"]),
    )
    def fails(self, worker: int, state: ContactState) -> None:
        self.workers[worker].failed(state, "error")
        self.latest = state

    @rule(worker=st.integers(0, 1))
    def serves(self, worker: int) -> None:
        contact = self.workers[worker]
        if contact.observation.state != "ok":
            self.latest = "ok"
        contact.served()

    @rule(worker=st.integers(0, 1))
    def is_busy(self, worker: int) -> None:
        self.workers[worker].was_busy("answered 429")
        self.latest = self.workers[worker].observation.state

    @rule(worker=st.integers(0, 1))
    def hears(self, worker: int) -> None:
        self.workers[worker].heard(self.workers[1 - worker].observation)

    @rule()
    def both_hear(self) -> None:
        for worker in (0, 1, 0):
            self.hears(worker)
        first, second = (each.observation for each in self.workers)
        assert first == second and first.state == self.latest

    @invariant()
    def times_are_in_order(self) -> None:
        for found in (each.observation for each in self.workers):
            if found == Observation():
                continue
            assert found.since is not None and found.since <= found.seen_at <= self.now
            assert (found.last_error_at or -math.inf) <= found.seen_at
            assert (found.last_error is None) == (found.last_error_at is None)


Sharing.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=20)
TestSharing = Sharing.TestCase
