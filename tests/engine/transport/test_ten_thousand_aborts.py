"""Ten thousand requests that nobody lets end: cancelled, cut off with their connection, out of
time, paused and forgotten, at whatever step; each leaves nothing behind when it goes.

The scheduler is the real one over few blocks, and every step of it is held to the oracle of
`scheduler_world.py`: that others read their own text shows that nothing was freed too early either.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from engine.fairness import LANE_WEIGHTS
from engine.protocol import Lane
from engine.scheduling.lanes import LaneLimits
from engine.sequence import SequenceStatus
from tests.engine.scheduling.scheduler_world import PROMPTS, World, make_world, sampler
from tests.engine.scheduling.scheduling import embedding, request

NUM_ABORTS = 5_000
"""Each of two schedulers sees this many aborts."""
NUM_CONNECTIONS = 4
MAX_QUEUED = 5
TIGHT: dict[Lane, LaneLimits] = {
    "agentic": LaneLimits(max_share=0.7, kv_headroom=0.1),
    "batch": LaneLimits(max_share=0.3, kv_headroom=0.5),
}


class Traffic:
    """Requests of a few connections, and their untimely ends."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.draw = sampler(rng)
        self.num_requests = self.num_cancelled = self.num_cut_off = 0
        self.num_paused = self.num_begun = 0
        """How many of the aborted requests were paused, and how many had begun to write."""

    @property
    def num_aborted(self) -> int:
        return self.num_cancelled + self.num_cut_off + self.world.num_expired

    def connection_of(self, request_id: str) -> int:
        return int(request_id[1:]) % NUM_CONNECTIONS

    def arrive(self) -> None:
        rng = self.rng
        self.num_requests += 1
        name = f"r{self.num_requests}"
        turn: dict[str, Any] = {
            "lane": rng.choice(sorted(LANE_WEIGHTS)),
            "tenant": rng.choice("abc"),
            "weight": rng.choice([0.25, 1.0, 4.0]),
            "deadline_s": rng.choice([None, 1, 5]),
        }
        prompt = rng.choice(PROMPTS)[: rng.randint(1, 20)] + [40] * rng.randint(0, 3)
        salt = rng.choice(["", "org-2"])
        if rng.random() < 0.1:
            self.world.add(embedding(name, prompt, salt, turn))
            return
        options = {"n": rng.choice([1, 1, 1, 3]), "max_tokens": rng.randint(1, 40)}
        self.world.add(request(name, prompt, salt=salt, turn=turn, ignore_eos=True, **options))

    def abort(self, request_ids: Iterable[str]) -> None:
        """All of them before the next step."""
        for request_id in request_ids:
            world = self.world
            sequences = list(world.scheduler._requests[request_id].sequences)
            self.num_paused += request_id in world.paused
            self.num_begun += any(seq.num_output_tokens for seq in sequences)
            world.abort(request_id)
            assert all(
                seq.status is SequenceStatus.FINISHED and not seq.block_table for seq in sequences
            ), f"{request_id} holds blocks"
            world.check()

    def act(self) -> None:
        """Something happens between two steps."""
        world, rng = self.world, self.rng
        while world.scheduler.num_queued < MAX_QUEUED and rng.random() < 0.7:
            self.arrive()
        opened = sorted(world.open)
        if opened and rng.random() < 0.3:
            one = rng.choice(opened)
            (world.resume if one in world.paused else world.pause)(one)
        if opened and rng.random() < 0.06:
            lost = rng.randrange(NUM_CONNECTIONS)
            theirs = [each for each in opened if self.connection_of(each) == lost]
            self.num_cut_off += len(theirs)
            self.abort(theirs)
        elif opened and rng.random() < 0.3:
            self.num_cancelled += 1
            self.abort([rng.choice(opened)])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("window", "ahead", "drafts", "limits"),
    [(None, True, False, TIGHT), (7, False, True, {})],
    ids=["a step ahead, tight lanes", "a window, drafts"],
)
def test_whoever_goes_leaves_nothing(
    window: int | None, ahead: bool, drafts: bool, limits: dict[Lane, LaneLimits]
) -> None:
    rng = random.Random(5)
    world = make_world(
        spare_blocks=6,
        window=window,
        enabled=True,
        max_tokens=9,
        max_seqs=5,
        ahead=ahead,
        drafts=drafts,
        limits=limits,
    )
    traffic = Traffic(world, rng)
    while traffic.num_aborted < NUM_ABORTS:
        traffic.act()
        world.step(traffic.draw)
        world.check()
    assert min(traffic.num_cancelled, traffic.num_cut_off, world.num_expired) > NUM_ABORTS // 20
    assert min(traffic.num_paused, traffic.num_begun) > NUM_ABORTS // 20
    assert world.scheduler.num_preemptions > 0
    traffic.abort(sorted(world.open))
    world.step(traffic.draw)
    world.take_in()  # of what was in flight nothing is heard
    world.check()
    scheduler = world.scheduler
    assert not scheduler.has_unfinished() and not world.launched
    assert scheduler.num_free_blocks == scheduler.cache.pool.num_blocks
    assert scheduler._share.num_tenants <= 3 * len(LANE_WEIGHTS)
    assert len(scheduler._deadlines) <= 64 + 2 * MAX_QUEUED, "no deadline is kept for ever"
