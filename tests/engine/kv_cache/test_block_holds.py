"""Holds: what is held is not evicted, what is told is never another block's, all comes to an
end.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.kv_cache.block_holds import (
    MAX_HOLD_S,
    MAX_HOLDS,
    BlockHolds,
    BlockRange,
    raise_generation,
)
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.prefix_cache import PrefixCache
from engine.sequence import Sequence
from tests.budget import examples
from tests.engine.kv_cache.test_prefix_cache import compute, sequence

NUM_BLOCKS, MAX_HELD = 12, 5
PROMPTS = [[number // 2, *range(number, number + 11)] for number in range(6)]


class Holds(RuleBasedStateMachine):
    """Against a model: the content of each block, and of each hold the blocks that it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.generations = [0] * NUM_BLOCKS
        pool = BlockPool(NUM_BLOCKS, on_free=partial(raise_generation, self.generations))
        self.cache = PrefixCache(pool, 4)
        self.holds = BlockHolds(
            self.cache, self.generations, max_blocks=MAX_HELD, clock=lambda: self.now_s
        )
        self.running: list[Sequence] = []
        self.told: dict[int, tuple[BlockRange, list[bytes], float]] = {}

    @rule(number=st.integers(0, 5))
    def start(self, number: int) -> None:
        seq = sequence(PROMPTS[number])
        table = self.cache.match(seq)
        wanted = self.cache.num_blocks_for(seq.num_tokens) - len(table)
        if wanted + self.cache.num_idle(table) <= self.cache.num_available:
            self.running.append(compute(self.cache, seq))

    @rule(number=st.integers(0, 5))
    def end(self, number: int) -> None:
        if self.running:
            self.cache.release(self.running.pop(number % len(self.running)))

    @rule(number=st.integers(0, 5), duration_s=st.floats(0, 2 * MAX_HOLD_S))
    def hold(self, number: int, duration_s: float) -> None:
        seq = sequence(PROMPTS[number])
        digests = self.cache.prompt_digests(seq)[1:]
        front = self.holds.find(digests)
        for block, digest in zip(front.blocks, digests, strict=False):
            assert self.cache.find(digest) == block
        hold_id = self.holds.begin(front, duration_s)
        assert hold_id, "far fewer than the bound"
        ends_s = self.now_s + min(duration_s, MAX_HOLD_S)
        self.told[hold_id] = (front, digests, ends_s)

    @rule(number=st.integers(0, 5))
    def release(self, number: int) -> None:
        if self.told:
            hold_id = list(self.told)[number % len(self.told)]
            self.holds.release(hold_id)
            del self.told[hold_id]

    @rule(passed_s=st.floats(0, MAX_HOLD_S))
    def wait(self, passed_s: float) -> None:
        self.now_s += passed_s

    @rule()
    def advance(self) -> None:
        self.holds.advance()
        for hold_id in [key for key, (_, _, ends_s) in self.told.items() if ends_s <= self.now_s]:
            del self.told[hold_id]
        assert all(self.holds.is_held(hold_id) for hold_id in self.told)
        assert sum(1 for _ in self.holds.tables()) == len(self.told)

    @invariant()
    def nothing_told_is_another_block(self) -> None:
        """A generation that is what it was told to be means the content that was asked for."""
        for front, digests, _ in self.told.values():
            for block, generation, digest in zip(*front, digests, strict=False):
                if self.generations[block] == generation:
                    assert self.cache.find(digest) == block

    @invariant()
    def what_is_held_is_cached_and_bounded(self) -> None:
        assert self.holds.num_blocks <= MAX_HELD
        for table in self.holds.tables():
            assert all(self.cache.pool.refcount(block) > 0 for block in table)
        self.cache.check_integrity(self.running, self.holds.tables())

    def teardown(self) -> None:
        for seq in self.running:
            self.cache.release(seq)
        self.now_s += MAX_HOLD_S
        self.holds.advance()
        assert self.holds.num_blocks == 0 and self.cache.num_available == NUM_BLOCKS


Holds.TestCase.settings = settings(
    max_examples=examples(200), stateful_step_count=40, deadline=None
)
TestHolds = Holds.TestCase


def test_more_holds_than_the_bound_are_not_kept() -> None:
    cache = PrefixCache(BlockPool(4), 4)
    holds = BlockHolds(cache, [0] * 4, max_blocks=4, clock=lambda: 0.0)
    begun = [holds.begin(BlockRange([], []), 1.0) for _ in range(MAX_HOLDS + 1)]
    assert all(begun[:-1]) and begun[-1] == 0


@pytest.mark.parametrize("duration_s", [math.nan, math.inf, 1e9])
def test_no_hold_is_for_ever(duration_s: float) -> None:
    now_s = 0.0
    holds = BlockHolds(PrefixCache(BlockPool(4), 4), [0] * 4, max_blocks=4, clock=lambda: now_s)
    hold_id = holds.begin(BlockRange([], []), duration_s)
    now_s = MAX_HOLD_S
    holds.advance()
    assert not holds.is_held(hold_id) and holds.num_expired == 1
