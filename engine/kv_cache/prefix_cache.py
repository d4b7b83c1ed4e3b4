"""Block tables, and the content-addressed cache of full KV blocks that they share.

Knows tokens and blocks; knows no queue, no request and no tensor.

A full block is known by the digest of the whole text up to its end and of the salt, so tenants
never meet (`engine.prefix_digests`). The digests make a radix tree without storing one: children
are found by hashing on.

Eviction is LRU over the idle cached blocks and takes leaves only, those first that no lease is on
(`cache_leases.py`), by two rules:

  - a table is released from its end: of one table, a child becomes idle before its parent;
  - a table's registered blocks are *the* registered ones: where two sequences computed the same
    content, the first registered block is kept and `register` points the second table to it. So
    whoever holds a child holds its parent, and a parent outlives its children in LRU order.

Hence every idle cached block can be evicted, and counts as available. A lease that is on a block is
on its parent, too: what no lease is on has no child under one.

With a sliding window of W tokens, position p attends to positions p-W+1..p only. A block wholly
before that is given back while its children are still held, and may be evicted before them. That is
right there: a match of k blocks needs only those that position k * block_size still sees (their
content, at every layer, does not change when older blocks vanish), and `match` takes the longest
such k. Earlier entries of the matched table are FREED.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Items
from itertools import islice

from engine.kv_cache.block_leases import CacheLeases
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.cache_events import CacheEvents
from engine.prefix_digests import SPAN_BLOCKS, block_digests, root_digest
from engine.sequence import FREED, Sequence


def max_blocks_per_sequence(
    max_model_len: int,
    *,
    block_size: int,
    sliding_window: int | None,
    max_num_batched_tokens: int,
    max_steps_in_flight: int = 1,
) -> int:
    """Most blocks a sequence ever holds; a scheduler wants at least as many. With a window of W, a
    chunk sees W - 1 tokens before its first one, at the worst alignment; blocks are given back when
    a step is taken in."""
    longest = -(-max_model_len // block_size)
    if sliding_window is None:
        return longest
    span = sliding_window - 1 + max_num_batched_tokens * max_steps_in_flight
    return min(longest, -(-(span - 1) // block_size) + 1)


class PrefixCache:
    """Fills and empties the block tables of sequences over one `BlockPool`.

    `sliding_window` is the whole model's window in tokens, None when any layer attends to all.
    With enabled=False nothing is shared or kept and the class is a plain block allocator.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        enabled: bool = True,
        sliding_window: int | None = None,
        leases: CacheLeases | None = None,
    ) -> None:
        """leases: None: there are none."""
        assert block_size >= 1, f"block_size must be at least 1, not {block_size}"
        assert sliding_window is None or sliding_window >= 1, f"sliding_window {sliding_window}"
        self.pool = pool
        self.block_size = block_size
        self.enabled = enabled
        self.sliding_window = sliding_window
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self.leases = leases or CacheLeases(0, lambda: 0.0)
        self.events = CacheEvents()
        self.num_evictions = 0
        """Since the start."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._leased: OrderedDict[int, None] = OrderedDict()
        """Cached blocks that no table holds, without a lease and with one, least recently released
        first."""

    @property
    def num_available(self) -> int:
        """Blocks that no table holds: free ones and evictable ones."""
        return self.pool.num_free + len(self._idle) + len(self._leased)

    @property
    def num_idle_blocks(self) -> int:
        """Cached blocks that no table holds and no lease is on."""
        return len(self._idle)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose content is found, held by a table or not."""
        return len(self._block_of)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def first_visible_block(self, position: int) -> int:
        """Index of the first block that the token at `position` attends to."""
        if self.sliding_window is None:
            return 0
        return max(0, position - self.sliding_window + 1) // self.block_size

    def serves(self, seq: Sequence) -> bool:
        """Whether `seq` may skip what is cached: a mean needs the hidden states of all its tokens,
        and only their keys and values are kept."""
        return self.enabled and seq.pooling != "mean" and not seq.lacks_scores

    def match(self, seq: Sequence) -> list[int]:
        """The longest cached prefix as a block table, at least one token short of `num_tokens`,
        because the last one must be computed to sample. Changes no block. O(num_tokens)."""
        if not self.serves(seq):
            return []
        longest = run = 0
        for end in range(1, (seq.num_tokens - 1) // self.block_size + 1):
            if self.digest(seq, end - 1) in self._block_of:
                run += 1
                if run >= end - self.first_visible_block(end * self.block_size):
                    longest = end
            elif self.sliding_window is None:
                break
            else:
                run = 0
        if longest == 0:
            return []
        first = self.first_visible_block(longest * self.block_size)
        held = [self._block_of[digest] for digest in seq.block_digests[first:longest]]
        return [FREED] * first + held

    def num_cached_tokens(self, seq: Sequence) -> int:
        """Return how many leading tokens `seq` would skip if it started now. O(these)."""
        return len(self.match(seq)) * self.block_size

    def prompt_digests(self, seq: Sequence) -> list[bytes]:
        """Return the digests of the salt, then of each full block of the prompt."""
        num_full = seq.num_prompt_tokens // self.block_size
        if num_full:
            self.digest(seq, num_full - 1)
        return [root_digest(seq.cache_salt), *seq.block_digests[:num_full]]

    def num_idle(self, table: Iterable[int]) -> int:
        """How many blocks of a matched table count as available until it is adopted."""
        return sum(block in self._idle or block in self._leased for block in table)

    def num_released(self, seq: Sequence, held: Counter[int], but: Collection[int]) -> int:
        """How many blocks `release` would give back that are not among `but`, once those of whom
        `held` counts the blocks are released, too. `seq` is counted into `held`."""
        num_released = 0
        for block in seq.block_table[seq.num_freed_blocks :]:
            held[block] += 1
            num_released += held[block] == self.pool.refcount(block) and block not in but
        return num_released

    def adopt(self, seq: Sequence, table: list[int]) -> None:
        """Give `seq`, which holds nothing, the table that `match` found for it just now."""
        assert not seq.block_table and seq.num_computed_tokens == 0, "the sequence holds blocks"
        for block in table:
            if block != FREED:
                self._take(block)
        seq.block_table = table
        seq.num_freed_blocks = table.count(FREED)
        seq.num_registered_blocks = len(table)
        seq.num_computed_tokens = len(table) * self.block_size

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Make the table cover the first `num_tokens`. False, and nothing changed, when too few
        blocks are available. Evicts the least recently used as needed."""
        if num_tokens <= len(seq.block_table) * self.block_size:
            return True  # as in most steps of most sequences
        missing = self.num_blocks_for(num_tokens) - len(seq.block_table)
        if missing > self.num_available:
            return False
        for _ in range(missing):
            seq.block_table.append(self.allocate())
        return True

    def register(self, seq: Sequence) -> None:
        """Let others find the full blocks among the computed tokens. A block whose content is
        registered already is exchanged for the registered one."""
        if not self.enabled:
            return
        for index in range(seq.num_registered_blocks, seq.num_computed_tokens // self.block_size):
            digest, block = self.digest(seq, index), seq.block_table[index]
            known = self._block_of.get(digest)
            if known is None:
                self._file(digest, block, index)
            else:
                self._take(known)
                seq.block_table[index] = known
                self._drop(block)
            seq.num_registered_blocks = index + 1

    def slide(self, seq: Sequence) -> None:
        """Give back the blocks that the next token to compute no longer sees."""
        if self.sliding_window is None:
            return
        first = self.first_visible_block(seq.num_computed_tokens)
        for index in range(seq.num_freed_blocks, first):
            self._drop(seq.block_table[index])
            seq.block_table[index] = FREED
        seq.num_freed_blocks = max(first, seq.num_freed_blocks)

    def release(self, seq: Sequence) -> None:
        """Give back everything; the sequence starts over from position 0. Registered blocks stay
        findable until they are evicted, the rest is free at once."""
        for block in reversed(seq.block_table[seq.num_freed_blocks :]):
            self._drop(block)
        seq.block_table = []
        seq.num_freed_blocks = seq.num_registered_blocks = seq.num_computed_tokens = 0

    def digest(self, seq: Sequence, index: int) -> bytes:
        """Return the digest of full block `index`, kept with the sequence. What else of its span is
        in the prompt is hashed with it: it will be asked for, too."""
        digests, size = seq.block_digests, self.block_size
        while len(digests) <= index:
            known = len(digests)
            first = known - known % SPAN_BLOCKS
            stop = min(first + SPAN_BLOCKS, max(index + 1, seq.num_prompt_tokens // size))
            before = digests[first - 1] if first else root_digest(seq.cache_salt)
            span = block_digests(before, seq.tokens(first * size, stop * size), size)
            digests += span[known - first :]
        return digests[index]

    def find(self, digest: bytes) -> int | None:
        """Return the block with this content."""
        return self._block_of.get(digest)

    def hold(self, table: Iterable[int]) -> None:
        """Keep cached blocks from being evicted, until `unhold`."""
        for block in table:
            self._take(block)

    def unhold(self, table: Items[int]) -> None:
        """Hold a prefix no more; nor what was allocated, which is registered by now."""
        for block in reversed(table):
            self._drop(block)

    def allocate(self) -> int:
        """Return a block that is held once and has no content yet; evicts one if it has to."""
        if self.pool.num_free == 0:
            self._evict()
        return self.pool.allocate()

    def register_loaded(self, digest: bytes, block: int, index: int) -> None:
        """Let others find what a held block got from a tier: block `index` of a prompt, which no
        other block has."""
        assert digest not in self._block_of and block not in self._digest_of
        self._file(digest, block, index)

    def next_evicted(self, num_blocks: int) -> list[bytes]:
        """Return the digests of the blocks that are evicted next, the first one first."""
        return [self._digest_of[block] for block in islice(self._idle, num_blocks)]

    def expire_leases(self) -> None:
        """End leases that are over: their blocks may be evicted as any other, the latest last."""
        for block in self.leases.expire():
            self._unlease(block)

    def check_integrity(
        self, sequences: Iterable[Sequence], tables: Iterable[Items[int]] = ()
    ) -> None:
        """AssertionError unless every block is exactly one of free, idle and cached, or held by as
        many of the tables of `sequences` (all there are) and other `tables` as its count says."""
        self.pool.check_integrity()
        held: dict[int, int] = dict(Counter(block for table in tables for block in table))
        for seq in sequences:
            self._check_table(seq)
            for block in seq.block_table[seq.num_freed_blocks :]:
                held[block] = held.get(block, 0) + 1
        for block, count in held.items():
            assert self.pool.refcount(block) == count, f"block {block}: {count} tables hold it"
            assert count == 1 or block in self._digest_of, f"block {block} shared, not cached"
        for idle, leased in ((self._idle, False), (self._leased, True)):
            for block in idle:
                assert self.pool.refcount(block) == 0, f"block {block} is idle and held"
                assert block in self._digest_of, f"block {block} is idle and not cached"
                assert self.leases.holds(block) == leased, f"block {block} is in the wrong order"
        total = self.num_available + len(held)
        assert total == self.pool.num_blocks, f"{self.pool.num_blocks - total} blocks leaked"
        assert len(self._block_of) == len(self._digest_of)
        for digest, block in self._block_of.items():
            assert self._digest_of[block] == digest, f"block {block} is filed under another digest"

    def _check_table(self, seq: Sequence) -> None:
        table, freed = seq.block_table, seq.num_freed_blocks
        assert all(block == FREED for block in table[:freed]), "a freed entry still names a block"
        assert FREED not in table[freed:], "a live entry is marked freed"
        assert len(table) * self.block_size >= seq.num_computed_tokens, "tokens without a block"
        assert freed <= self.first_visible_block(seq.num_computed_tokens), "a visible block freed"
        for index in range(freed, seq.num_registered_blocks):
            assert self._digest_of[table[index]] == seq.block_digests[index], "wrong content"

    def _file(self, digest: bytes, block: int, index: int) -> None:
        self._block_of[digest], self._digest_of[block] = block, digest
        if (index + 1) % SPAN_BLOCKS == 0:
            self.events.stored(block, digest)

    def _take(self, block: int) -> None:
        if self.pool.ref(block) == 1:
            del (self._leased if self.leases.holds(block) else self._idle)[block]

    def _drop(self, block: int) -> None:
        if self.pool.unref(block) == 0:
            if block in self._digest_of:
                (self._leased if self.leases.holds(block) else self._idle)[block] = None
            else:
                self.pool.free(block)

    def _evict(self) -> None:
        if not self._idle:
            for block in self.leases.break_off(next(iter(self._leased))):
                self._unlease(block)
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._digest_of.pop(block)]
        self.num_evictions += 1
        self.events.evicted(block)
        self.pool.free(block)

    def _unlease(self, block: int) -> None:
        """No lease is on it any more; it may be held."""
        if block in self._leased:
            del self._leased[block]
            self._idle[block] = None
