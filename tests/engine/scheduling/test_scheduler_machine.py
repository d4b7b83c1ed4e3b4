"""The scheduler under random traffic over few blocks: every step is checked against an oracle
(`scheduler_world.py`). In half of the runs everybody is of one lane and one tenant, and waits no
longer than those before it take; in the other half there are lanes with limits, tenants with
weights, pauses and deadlines."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.fairness import LANE_WEIGHTS
from engine.protocol import Lane
from engine.scheduling.lanes import LaneLimits
from tests.budget import examples
from tests.engine.scheduling.scheduler_world import PROMPTS, World, make_world, sampler
from tests.engine.scheduling.scheduling import embedding, request

TURNS = st.fixed_dictionaries(
    {
        "lane": st.sampled_from(sorted(LANE_WEIGHTS)),
        "priority": st.integers(-1, 1),
        "tenant": st.sampled_from(["", "a", "b"]),
        "weight": st.sampled_from([0.25, 1.0, 4.0]),
        "deadline_s": st.one_of(st.none(), st.integers(1, 30)),
    }
)
TIGHT: dict[Lane, LaneLimits] = {
    "agentic": LaneLimits(max_share=0.7, kv_headroom=0.1),
    "batch": LaneLimits(max_share=0.3, kv_headroom=0.5),
}


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        options=st.fixed_dictionaries(
            {
                "spare_blocks": st.integers(0, 12),
                "window": st.one_of(st.none(), st.integers(1, 20)),
                "enabled": st.booleans(),
                "max_tokens": st.integers(1, 24),
                "max_seqs": st.integers(1, 6),
                "ahead": st.booleans(),
                "drafts": st.booleans(),
                "pooling": st.sampled_from(["last", "mean"]),
                "limits": st.sampled_from([None, {}, TIGHT]),
            }
        )
    )
    def start(self, options: dict[str, Any]) -> None:
        self.world = make_world(**options)
        self.num_requests = 0

    @precondition(lambda self: self.world.scheduler.num_queued < 6)
    @rule(
        text=st.sampled_from(PROMPTS),
        length=st.integers(1, 20),
        suffix=st.lists(st.integers(40, 41), max_size=3),
        salt=st.sampled_from(["", "", "org-2"]),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        max_tokens=st.integers(1, 40),
        min_tokens=st.integers(0, 4),
        ignore_eos=st.booleans(),
        turn=TURNS,
    )
    def add(
        self,
        text: list[int],
        length: int,
        suffix: list[int],
        salt: str,
        n: int,
        max_tokens: int,
        min_tokens: int,
        ignore_eos: bool,
        turn: dict[str, Any],
    ) -> None:
        self.num_requests += 1
        self.world.add(
            request(
                f"r{self.num_requests}",
                text[:length] + suffix,
                salt=salt,
                n=n,
                max_tokens=max_tokens,
                min_tokens=min(min_tokens, max_tokens),
                ignore_eos=ignore_eos,
                stop_token_ids=(8,),
                turn=turn if self.world.lanes else None,
            )
        )

    @precondition(lambda self: self.world.scheduler.num_queued < 6)
    @rule(
        text=st.sampled_from(PROMPTS),
        length=st.integers(1, 20),
        suffix=st.lists(st.integers(40, 41), max_size=20),
        salt=st.sampled_from(["", "", "org-2"]),
        turn=TURNS,
    )
    def add_embedding(
        self, text: list[int], length: int, suffix: list[int], salt: str, turn: dict[str, Any]
    ) -> None:
        self.num_requests += 1
        prompt = text[:length] + suffix
        asked = turn if self.world.lanes else None
        self.world.add(embedding(f"r{self.num_requests}", prompt, salt, asked))

    @rule(seed=st.integers(0, 2**16), times=st.integers(1, 8))
    def steps(self, seed: int, times: int) -> None:
        draw = sampler(random.Random(seed))
        for _ in range(times):
            self.world.step(draw)
            self.world.check()

    @precondition(lambda self: self.world.open)
    @rule(tries_alone=st.booleans())
    def failing_step(self, tries_alone: bool) -> None:
        self.world.fail(tries_alone=tries_alone)

    @precondition(lambda self: self.world.lanes and self.world.open)
    @rule(data=st.data(), is_paused=st.booleans())
    def pause_or_resume(self, data: st.DataObject, is_paused: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.world.open)))
        (self.world.pause if is_paused else self.world.resume)(request_id)

    @precondition(lambda self: self.world.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.world.abort(data.draw(st.sampled_from(sorted(self.world.open))))

    @precondition(lambda self: self.world.open)
    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        self.world.take_back(data.draw(st.sampled_from(sorted(self.world.open))))

    @invariant()
    def checks(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain(sampler(random.Random(0)))
            assert self.world.ended == {f"r{i + 1}" for i in range(self.num_requests)}


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=examples(100), stateful_step_count=40, deadline=None
)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("window", "enabled", "spare_blocks"),
    [(None, True, 6), (None, False, 6), (7, True, 4), (None, True, 0)],
)
def test_a_thousand_steps_of_traffic(
    window: int | None, enabled: bool, spare_blocks: int, ahead: bool, drafts: bool
) -> None:
    traffic(1000, window, enabled, spare_blocks, ahead, drafts)


@pytest.mark.parametrize("limits", [{}, TIGHT])
@pytest.mark.parametrize(("window", "ahead"), [(None, True), (7, False)])
def test_a_thousand_steps_of_lanes(
    window: int | None, ahead: bool, limits: dict[Lane, LaneLimits]
) -> None:
    world = traffic(1000, window, True, 6, ahead, False, limits)
    assert world.num_expired > 5
    assert world.num_halted_victims > 5


@pytest.mark.nightly
def test_ten_thousand_steps_of_traffic() -> None:
    traffic(10_000, None, True, 6, True, True)


def traffic(
    num_steps: int,
    window: int | None,
    enabled: bool,
    spare_blocks: int,
    ahead: bool,
    drafts: bool,
    limits: dict[Lane, LaneLimits] | None = None,
) -> World:
    """Random requests and aborts; the books are checked after every step."""
    rng = random.Random(f"{window} {enabled} {spare_blocks}")
    world = make_world(
        spare_blocks=spare_blocks,
        window=window,
        enabled=enabled,
        max_tokens=9,
        max_seqs=5,
        ahead=ahead,
        drafts=drafts,
        pooling="mean" if drafts else "last",
        limits=limits,
    )
    draw, num_requests = sampler(rng), 0
    while world.num_steps < num_steps:
        while world.scheduler.num_queued < 4 and rng.random() < 0.4:
            num_requests += 1
            turn = None if limits is None else random_turn(rng)
            prompt = rng.choice(PROMPTS)[: rng.randint(1, 20)] + [40] * rng.randint(0, 3)
            if rng.random() < 0.2:
                long = prompt + [41] * rng.randint(0, 17)
                world.add(embedding(f"r{num_requests}", long, rng.choice(["", "org-2"]), turn))
                continue
            world.add(
                request(
                    f"r{num_requests}",
                    prompt,
                    n=rng.choice([1, 1, 1, 3]),
                    max_tokens=rng.randint(1, 40),
                    salt=rng.choice(["", "org-2"]),
                    turn=turn,
                )
            )
        if limits is not None and world.open and rng.random() < 0.2:
            request_id = rng.choice(sorted(world.open))
            (world.resume if request_id in world.paused else world.pause)(request_id)
        if world.open and rng.random() < 0.01:
            world.abort(rng.choice(sorted(world.open)))
        if rng.random() < 0.005:
            world.fail(tries_alone=rng.random() < 0.7)
        world.step(draw)
        world.check()
    world.drain(draw)
    scheduler = world.scheduler
    assert world.ended == {f"r{i + 1}" for i in range(num_requests)}
    assert num_requests > num_steps // 20
    assert scheduler.num_preemptions > 0 or window is not None, "the pool was never short"
    assert (scheduler.prefix_cache_hit_tokens > 0) is enabled
    assert (world.num_accepted > 0) is drafts
    assert world.num_embedded > num_requests // 10
    assert world.num_trials > 0
    assert world.num_dropped > 0 if ahead else world.num_dropped == 0
    return world


def random_turn(rng: random.Random) -> dict[str, Any]:
    return {
        "lane": rng.choice(sorted(LANE_WEIGHTS)),
        "tenant": rng.choice("ab"),
        "weight": rng.choice([0.25, 1.0, 4.0]),
        "deadline_s": rng.choice([None, None, 5, 50]),
    }
