"""The block pool against a model of three sets: free, idle, held."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.kv_cache.block_pool import BlockPool
from tests.budget import examples


def test_hands_out_every_block_once_and_then_none() -> None:
    pool = BlockPool(3)
    assert sorted(pool.allocate() for _ in range(3)) == [0, 1, 2]
    assert pool.num_free == 0
    with pytest.raises(IndexError):
        pool.allocate()


def test_a_block_is_free_again_only_after_its_last_holder_and_free() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    assert pool.ref(block) == 2
    assert pool.unref(block) == 1
    assert pool.unref(block) == 0
    assert pool.num_free == 0, "idle: somebody may still keep the content"
    pool.free(block)
    assert pool.num_free == 1


def test_an_idle_block_can_be_held_again() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.unref(block)
    assert pool.ref(block) == 1
    assert pool.refcount(block) == 1


def test_refuses_misuse() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    with pytest.raises(AssertionError, match="not idle"):
        pool.free(block)
    pool.unref(block)
    with pytest.raises(AssertionError, match="not held"):
        pool.unref(block)
    pool.free(block)
    for misuse in (pool.free, pool.unref, pool.ref, pool.refcount):
        with pytest.raises(AssertionError):
            misuse(block)
    with pytest.raises(AssertionError, match="at least 1"):
        BlockPool(0)


@pytest.mark.parametrize("damage", ["twice", "lost", "count"])
def test_check_integrity_sees_damage(damage: str) -> None:
    pool = BlockPool(4)
    pool.check_integrity()
    if damage == "twice":
        pool._free[0] = pool._free[1]
    elif damage == "lost":
        pool._free.pop()
    else:
        pool._refcounts[pool.allocate()] = -1
    with pytest.raises(AssertionError):
        pool.check_integrity()


class BlockPoolMachine(RuleBasedStateMachine):
    """Random legal calls; the pool must agree with `self.held` and `self.idle` at every moment."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.held: dict[int, int] = {}
        self.idle: set[int] = set()

    @precondition(lambda self: self.pool.num_free)
    @rule()
    def allocate(self) -> None:
        block = self.pool.allocate()
        assert block not in self.held and block not in self.idle
        self.held[block] = 1

    @precondition(lambda self: self.held or self.idle)
    @rule(data=st.data())
    def ref(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.held.keys() | self.idle)))
        self.held[block] = self.held.get(block, 0) + 1
        self.idle.discard(block)
        assert self.pool.ref(block) == self.held[block]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unref(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        self.held[block] -= 1
        assert self.pool.unref(block) == self.held[block]
        if not self.held[block]:
            del self.held[block]
            self.idle.add(block)

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.idle)))
        self.idle.remove(block)
        self.pool.free(block)

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free == self.pool.num_blocks - len(self.held) - len(self.idle)
        for block, count in self.held.items():
            assert self.pool.refcount(block) == count
        for block in self.idle:
            assert self.pool.refcount(block) == 0


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
