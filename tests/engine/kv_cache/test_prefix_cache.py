"""The prefix cache: what is found, what is shared, what goes first, and that no content is lost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.prefix_cache import PrefixCache
from engine.protocol import SamplingParams
from engine.sequence import FREED, Sequence
from tests.budget import examples

_numbers = itertools.count()


def sequence(prompt: list[int], salt: str = "") -> Sequence:
    return Sequence(
        request_id="r",
        index=0,
        order=(next(_numbers), 0),
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=1),
        seed=0,
        cache_salt=salt,
    )


def make_cache(
    num_blocks: int = 16, *, enabled: bool = True, window: int | None = None
) -> PrefixCache:
    """Blocks of 4 tokens."""
    return PrefixCache(BlockPool(num_blocks), 4, enabled=enabled, sliding_window=window)


def compute(cache: PrefixCache, seq: Sequence, num_tokens: int | None = None) -> Sequence:
    """Take what is cached, then compute up to `num_tokens` (default: all)."""
    if not seq.block_table:
        cache.adopt(seq, cache.match(seq))
    stop = seq.num_tokens if num_tokens is None else num_tokens
    assert cache.grow(seq, stop)
    seq.num_computed_tokens = max(stop, seq.num_computed_tokens)
    cache.register(seq)
    cache.slide(seq)
    return seq


def cached_tokens(cache: PrefixCache, prompt: list[int], salt: str = "") -> int:
    return len(cache.match(sequence(prompt, salt))) * cache.block_size


def test_a_prefix_is_found_in_whole_blocks() -> None:
    cache = make_cache()
    first = compute(cache, sequence(list(range(10))))
    assert cache.match(sequence([*range(8), 99, 98])) == first.block_table[:2]
    assert cached_tokens(cache, [*range(7), 99, 98]) == 4
    assert cached_tokens(cache, [99, *range(1, 10)]) == 0


def test_the_last_token_is_left_to_compute() -> None:
    cache = make_cache()
    compute(cache, sequence(list(range(8))))
    assert cached_tokens(cache, list(range(8))) == 4
    assert cached_tokens(cache, list(range(9))) == 8


def test_only_computed_tokens_are_found() -> None:
    cache = make_cache()
    seq = compute(cache, sequence(list(range(12))), 7)
    assert cached_tokens(cache, list(range(12))) == 4
    compute(cache, seq, 8)
    assert cached_tokens(cache, list(range(12))) == 8


def test_generated_tokens_are_found_like_a_prompt() -> None:
    cache = make_cache()
    seq = compute(cache, sequence([1, 2, 3]))
    seq.output_token_ids += [4, 5, 6]
    compute(cache, seq)
    assert cached_tokens(cache, [1, 2, 3, 4, 9]) == 4


def test_salts_never_meet() -> None:
    cache = make_cache()
    compute(cache, sequence(list(range(8)), "org-1"))
    assert cached_tokens(cache, list(range(9)), "org-2") == 0
    assert cached_tokens(cache, list(range(9)), "org-1") == 8


def test_the_same_block_after_another_text_is_another_block() -> None:
    cache = make_cache()
    compute(cache, sequence([1, 1, 1, 1, 7, 7, 7, 7]))
    assert cached_tokens(cache, [2, 2, 2, 2, 7, 7, 7, 7, 0]) == 0


def test_shared_blocks_are_not_copied_and_outlive_their_first_owner() -> None:
    cache = make_cache(3)
    first = compute(cache, sequence([*range(8), 8]))
    table = list(first.block_table)
    second = sequence([*range(8), 9])
    cache.adopt(second, cache.match(second))
    assert second.block_table == table[:2]
    assert [cache.pool.refcount(b) for b in table] == [2, 2, 1]
    cache.check_integrity([first, second])
    cache.release(first)
    assert [cache.pool.refcount(b) for b in table[:2]] == [1, 1]
    assert cache.num_available == 1
    cache.release(second)
    assert cache.num_available == 3
    assert cache.num_cached_blocks == 2


def test_content_computed_twice_is_kept_once() -> None:
    cache = make_cache()
    first, second = sequence(list(range(9))), sequence(list(range(9)))
    for seq in (first, second):
        cache.adopt(seq, cache.match(seq))
        assert cache.grow(seq, 9)
        seq.num_computed_tokens = 9
    assert not set(first.block_table) & set(second.block_table)
    cache.register(first)
    cache.register(second)
    assert first.block_table[:2] == second.block_table[:2]
    assert first.block_table[2] != second.block_table[2]
    assert cache.num_available == 16 - 4
    cache.check_integrity([first, second])


def test_the_exchange_revives_an_idle_block() -> None:
    cache = make_cache()
    first, second = sequence(list(range(5))), sequence(list(range(5)))
    for seq in (first, second):
        assert cache.grow(seq, 5)
        seq.num_computed_tokens = 5
    cache.register(first)
    kept = first.block_table[0]
    cache.release(first)
    cache.register(second)
    assert second.block_table[0] == kept
    cache.check_integrity([second])


def test_growing_is_all_or_nothing() -> None:
    cache = make_cache(4)
    seq = sequence(list(range(20)))
    assert not cache.grow(seq, 17)
    assert seq.block_table == [] and cache.num_available == 4
    assert cache.grow(seq, 16) and cache.num_available == 0
    assert cache.grow(seq, 16), "already covered"


def test_eviction_takes_leaves_and_the_least_recently_used_chain() -> None:
    cache = make_cache(6)
    old = compute(cache, sequence([1] * 12))
    new = compute(cache, sequence([2] * 12))
    cache.release(old)
    cache.release(new)
    taker = sequence([9] * 24)
    left = []
    for num_blocks in range(1, 7):
        assert cache.grow(taker, num_blocks * 4)
        left.append((cached_tokens(cache, [1] * 13) // 4, cached_tokens(cache, [2] * 13) // 4))
    assert left == [(2, 3), (1, 3), (0, 3), (0, 2), (0, 1), (0, 0)]


def test_a_hit_makes_a_chain_recent_again() -> None:
    cache = make_cache(6)
    old = compute(cache, sequence([1] * 12))
    cache.release(old)
    cache.release(compute(cache, sequence([2] * 12)))
    cache.release(compute(cache, sequence([1] * 9)))
    taker = sequence([9] * 24)
    left = []
    for num_blocks in range(1, 7):
        assert cache.grow(taker, num_blocks * 4)
        left.append((cached_tokens(cache, [1] * 13) // 4, cached_tokens(cache, [2] * 13) // 4))
    # The third block of the old chain was not hit, so it is still the oldest.
    assert left == [(2, 3), (2, 2), (2, 1), (2, 0), (1, 0), (0, 0)]


def test_a_parent_shared_with_a_live_child_is_not_evicted() -> None:
    cache = make_cache(4)
    cache.release(compute(cache, sequence([1] * 8)))
    live = compute(cache, sequence([*[1] * 4, 2, 2, 2, 2]))
    assert cache.num_available == 2
    assert cache.grow(sequence([9] * 8), 8)
    assert cached_tokens(cache, [*[1] * 4, 2, 2, 2, 2, 0]) == 8
    assert cache.pool.refcount(live.block_table[0]) == 1


def test_num_idle_counts_what_adopting_takes_from_the_available() -> None:
    cache = make_cache()
    held = compute(cache, sequence(list(range(4))))
    cache.release(compute(cache, sequence(list(range(12)))))
    seq = sequence(list(range(13)))
    table, before = cache.match(seq), cache.num_available
    assert cache.num_idle(table) == 2
    cache.adopt(seq, table)
    assert before - cache.num_available == 2
    cache.check_integrity([held, seq])


def test_disabled_nothing_is_kept_or_found() -> None:
    cache = make_cache(enabled=False)
    seq = compute(cache, sequence(list(range(9))))
    assert cached_tokens(cache, list(range(9))) == 0
    cache.release(seq)
    assert cache.pool.num_free == 16 and cache.num_cached_blocks == 0


@pytest.mark.parametrize(
    ("window", "position", "block"), [(None, 99, 0), (5, 0, 0), (5, 7, 0), (5, 8, 1), (1, 8, 2)]
)
def test_first_visible_block(window: int | None, position: int, block: int) -> None:
    """A token sees itself and the window - 1 tokens before it."""
    assert make_cache(window=window).first_visible_block(position) == block


@pytest.mark.parametrize("enabled", [True, False])
def test_blocks_outside_the_window_are_given_back(enabled: bool) -> None:
    cache = make_cache(window=5, enabled=enabled)
    seq = compute(cache, sequence(list(range(20))), 12)
    # Position 12 sees 8..12.
    assert seq.block_table[:2] == [FREED, FREED] and len(seq.block_table) == 3
    assert cache.num_available == 15
    assert cache.pool.num_free == (13 if enabled else 15)
    cache.check_integrity([seq])
    compute(cache, seq)
    assert seq.block_table[:4] == [FREED] * 4 and seq.num_held_blocks == 1
    cache.release(seq)
    assert cache.num_available == 16
    cache.check_integrity([])


def test_with_a_window_a_match_needs_only_what_is_still_seen() -> None:
    cache = make_cache(4, window=5)
    seq = compute(cache, sequence(list(range(16))), 8)
    compute(cache, seq)
    # Four blocks are cached; a fifth evicts the first one. Position 16 sees 12..16.
    other = sequence([50] * 4)
    assert cache.grow(other, 4)
    follow_up = sequence(list(range(17)))
    table = cache.match(follow_up)
    assert table == [FREED, FREED, FREED, seq.block_table[3]]
    # Position 4 would see block 0, which is gone; position 8 sees block 1, which is not.
    assert cache.match(sequence(list(range(5)))) == []
    assert len(cache.match(sequence(list(range(9))))) == 2
    cache.adopt(follow_up, table)
    assert follow_up.num_computed_tokens == 16 and follow_up.num_freed_blocks == 3
    cache.check_integrity([seq, other, follow_up])


def test_with_a_window_a_hole_breaks_a_match() -> None:
    cache = make_cache(6, window=9)
    seq = compute(cache, sequence(list(range(20))), 16)
    # Position 16 sees 8..16: blocks 2 and 3 are held, 0 and 1 idle. Hold 0 and evict 1.
    start = compute(cache, sequence([0, 1, 2, 3, 50]))
    taker = sequence([60] * 8)
    assert cache.grow(taker, 8)
    # Position 12 would see blocks 1 and 2; position 4 sees block 0.
    assert cache.match(sequence(list(range(13)))) == start.block_table[:1]
    # Position 16 sees neither 0 nor 1.
    assert cache.match(sequence(list(range(17)))) == [FREED, FREED, *seq.block_table[2:]]
    cache.check_integrity([seq, start, taker])


def test_check_integrity_sees_a_leak_and_a_wrong_count() -> None:
    cache = make_cache()
    seq = compute(cache, sequence(list(range(9))))
    with pytest.raises(AssertionError, match="leaked"):
        cache.check_integrity([])
    cache.pool.ref(seq.block_table[0])
    with pytest.raises(AssertionError, match="tables hold it"):
        cache.check_integrity([seq])


class PrefixCacheMachine(RuleBasedStateMachine):
    """Sequences come, compute and go over few blocks and few texts. `self.memory` plays the KV
    cache: each computed position writes the text it stands for, and every position that a later
    one attends to must still hold its own text, whoever wrote it."""

    @initialize(
        num_blocks=st.integers(6, 14),
        window=st.one_of(st.none(), st.integers(1, 9)),
        enabled=st.booleans(),
    )
    def start(self, num_blocks: int, window: int | None, enabled: bool) -> None:
        self.cache = PrefixCache(BlockPool(num_blocks), 2, enabled=enabled, sliding_window=window)
        self.memory: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}
        self.live: list[Sequence] = []
        self.parents: dict[bytes, bytes] = {}

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12), salt=st.sampled_from("ab"))
    def arrive(self, prompt: list[int], salt: str) -> None:
        seq = sequence(prompt, salt)
        table, before = self.cache.match(seq), self.cache.num_available
        idle = self.cache.num_idle(table)
        self.cache.adopt(seq, table)
        assert self.cache.num_available == before - idle
        assert seq.num_computed_tokens < seq.num_tokens
        self.live.append(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), chunk=st.integers(1, 6))
    def advance(self, data: st.DataObject, chunk: int) -> None:
        seq = data.draw(st.sampled_from(self.live))
        missing = seq.num_tokens - seq.num_computed_tokens
        if missing == 0:
            seq.output_token_ids.append(data.draw(st.integers(0, 1)))
            missing = 1
        start, stop = seq.num_computed_tokens, seq.num_computed_tokens + min(chunk, missing)
        before = list(seq.block_table)
        if not self.cache.grow(seq, stop):
            assert seq.block_table == before
            return
        tokens = tuple(seq.token_ids)
        for position in range(start, stop):
            slot = (seq.block_table[position // 2], position % 2)
            self.memory[slot] = (seq.cache_salt, tokens[: position + 1])
        seq.num_computed_tokens = stop
        self.cache.register(seq)
        self.cache.slide(seq)
        if self.cache.enabled:
            for parent, digest in itertools.pairwise(seq.block_digests):
                self.parents[digest] = parent

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.live))
        self.live.remove(seq)
        self.cache.release(seq)
        assert seq.block_table == [] and seq.num_computed_tokens == 0

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.cache.check_integrity(self.live)
        if not self.live:
            assert self.cache.num_available == self.cache.pool.num_blocks

    @invariant()
    def what_is_attended_to_is_there(self) -> None:
        window = self.cache.sliding_window
        for seq in self.live:
            tokens, stop = tuple(seq.token_ids), seq.num_computed_tokens
            for position in range(0 if window is None else max(0, stop - window + 1), stop):
                slot = (seq.block_table[position // 2], position % 2)
                assert self.memory[slot] == (seq.cache_salt, tokens[: position + 1])

    @invariant()
    def no_child_outlives_its_parent(self) -> None:
        if self.cache.sliding_window is None:
            for digest in self.cache._block_of:
                assert self.parents.get(digest) is None or (
                    self.parents[digest] in self.cache._block_of
                )

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for seq in self.live:
                self.cache.release(seq)
            self.cache.check_integrity([])
            assert self.cache.num_available == self.cache.pool.num_blocks


TestPrefixCacheMachine = PrefixCacheMachine.TestCase
TestPrefixCacheMachine.settings = settings(
    max_examples=examples(120), stateful_step_count=40, deadline=None
)
