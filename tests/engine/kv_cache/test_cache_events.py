"""Checks what is told of the prefix cache against what is in it: with gaps, fresh starts and a
window."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import engine.kv_cache.cache_events
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.cache_events import CacheEvents
from engine.kv_cache.prefix_cache import PrefixCache
from engine.prefix_digests import SPAN_BLOCKS, span_keys
from engine.protocol import CacheChanged, SamplingParams
from engine.sequence import Sequence
from tests.budget import examples

_numbers = itertools.count()
SPANS = [[token] * SPAN_BLOCKS for token in range(3)]
"""Each of as many blocks as a span has, of one token each."""


def keys_in(told: bytes) -> set[int]:
    return {int.from_bytes(told[start : start + 8], "little") for start in range(0, len(told), 8)}


class Watcher:
    """Applies what it is told, as a gateway does."""

    def __init__(self, events: CacheEvents) -> None:
        self.events = events
        self.begin()

    def begin(self) -> None:
        parts = self.events.watch()
        assert [each.last for each in parts] == [False] * (len(parts) - 1) + [True]
        self.seq = parts[0].seq
        self.held = set().union(*(keys_in(each.keys) for each in parts))

    def hear(self, change: CacheChanged) -> bool:
        if change.seq != self.seq + 1:
            return False
        self.seq = change.seq
        removed, stored = keys_in(change.removed), keys_in(change.stored)
        assert removed <= self.held and not stored & self.held
        self.held = (self.held - removed) | stored
        return True


class Machine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(17, 40), window=st.none() | st.integers(1, 12))
    def start(self, num_blocks: int, window: int | None) -> None:
        self.cache = PrefixCache(BlockPool(num_blocks), 1, sliding_window=window)
        self.live: list[Sequence] = []
        self.known: dict[bytes, int] = {}
        """The key of each span that there ever was, by the digest of its last block."""
        self.watcher = Watcher(self.cache.events)
        self.is_watched = True

    @rule(spans=st.lists(st.sampled_from(SPANS), max_size=3), rest=st.integers(1, 3))
    def compute(self, spans: list[list[int]], rest: int) -> None:
        prompt = [*itertools.chain(*spans), *[9] * rest]
        seq = Sequence(
            request_id="r",
            index=0,
            order=(next(_numbers), 0),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=1),
            seed=0,
            cache_salt="s",
        )
        self.cache.adopt(seq, self.cache.match(seq))
        while seq.num_computed_tokens < seq.num_tokens:
            stop = min(seq.num_computed_tokens + 5, seq.num_tokens)
            if not self.cache.grow(seq, stop):
                self.cache.release(seq)
                return
            seq.num_computed_tokens = stop
            self.cache.register(seq)
            self.cache.slide(seq)
            ends = seq.block_digests[SPAN_BLOCKS - 1 :: SPAN_BLOCKS]
            self.known |= zip(ends, span_keys("s", prompt, 1), strict=False)
        self.live.append(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.live))
        self.live.remove(seq)
        self.cache.release(seq)

    @precondition(lambda self: self.is_watched)
    @rule()
    def tell(self) -> None:
        for change in self.cache.events.take_changes():
            assert self.watcher.hear(change)
        self.compare()

    @precondition(lambda self: self.is_watched)
    @rule()
    def miss_something(self) -> None:
        lost = self.cache.events.take_changes()
        self.cache.events.stored(-1, b"another")
        assert [self.watcher.hear(each) for each in self.cache.events.take_changes()] == [not lost]
        self.cache.events.evicted(-1)
        self.watcher.begin()
        self.compare()

    @rule()
    def look_away(self) -> None:
        self.cache.events.end_watch()
        self.is_watched = False

    @rule()
    def watch_again(self) -> None:
        self.watcher.begin()
        self.is_watched = True
        self.compare()

    def compare(self) -> None:
        ends = self.known.keys() & self.cache._block_of.keys()
        assert self.watcher.held == {self.known[each] for each in ends}
        assert not self.cache.events.has_changes


Machine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=30)
TestMachine = Machine.TestCase


def test_nothing_is_collected_while_nobody_watches() -> None:
    events = CacheEvents()
    events.stored(1, b"a" * 32)
    events.evicted(1)
    assert not events.has_changes and events.take_changes() == []


def test_what_comes_and_goes_between_two_looks_is_not_told() -> None:
    events = CacheEvents(clock=iter([5.0, 6.0, 7.0]).__next__)
    events.stored(1, b"a" * 32)
    assert [each.keys for each in events.watch()] == [b"a" * 8]
    events.stored(2, b"b" * 32)
    events.evicted(2)
    events.evicted(1)
    events.stored(3, b"a" * 32)
    assert not events.has_changes
    events.evicted(3)
    events.stored(4, b"b" * 32)
    lost, gained = events.take_changes()
    assert (lost.seq, lost.removed, lost.stored) == (1, b"a" * 8, b"")
    assert (gained.seq, gained.removed, gained.stored) == (2, b"", b"b" * 8)
    assert lost.since == 7.0, "of the first of what is left to tell"


def test_much_is_told_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.kv_cache.cache_events, "MAX_CACHE_KEYS", 2)
    events = CacheEvents()
    for block in range(5):
        events.stored(block, bytes([block]) * 32)
    parts = events.watch()
    assert [(len(each.keys), each.last) for each in parts] == [(16, False), (16, False), (8, True)]
    for block in range(5):
        events.evicted(block)
    changes = events.take_changes()
    assert [(each.seq, len(each.removed)) for each in changes] == [(1, 16), (2, 16), (3, 8)]
    assert [each.keys for each in events.watch()] == [b""] and events.watch()[0].seq == 3
