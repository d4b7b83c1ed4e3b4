"""Brings prefixes that the pool lacks from a tier, and writes to it what prompts use again.

A sequence whose prefix goes on in the tier is not started: it waits beside the queue while threads
read, and steps go on. In between two steps what arrived is copied into blocks that are held from
the first to the last, and only then registered. When all is there, or the rest is late, damaged or
without room, the sequence is back in its place in the queue, finds what is cached as any other
does, and computes the rest. What others are reading already is waited for, not read again.

Knows no request and no policy of its own (`engine.tiers.policy`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.kv_cache.prefix_cache import PrefixCache
from engine.sequence import Key, Sequence
from engine.tiers.disk import Arrival, DiskRead, DiskTier
from engine.tiers.policy import PrefillCosts, is_worth_reading, num_worth_keeping, patience_s

COPIES_PER_STEP = 8
"""Buffers that are copied into the pool, and out of it, between two steps at most."""
WAIT_S = 0.005
"""How long a loop with nothing to compute waits for a tier before it looks for commands again."""

STUCK_S = 10.0
"""A tier that takes nothing for so long is not waited for: what was to be written is dropped."""


class BlockCopier(Protocol):
    """Copies whole blocks of the pool, all layers of each, out of it and into it."""

    def gather(self, blocks: Items[int], rows: NDArray[np.uint8]) -> Callable[[], None]:
        """Begin to fill `rows` [blocks, block_bytes]. The result returns when they are filled; the
        blocks may be written to before."""

    def scatter(self, blocks: Items[int], rows: NDArray[np.uint8]) -> None:
        """Fill blocks from `rows`, which are the caller's again at the return."""


@dataclass(slots=True, eq=False)
class _Load:
    seq: Sequence
    table: list[int]
    """The blocks of its prefix so far, held."""
    start: int
    """Those that were in the pool when it began."""
    end: int
    """Those that there will be."""
    reading: DiskRead
    started_s: float
    followers: list[Sequence] = field(default_factory=list)


class PrefixLoader:
    """One per pool."""

    def __init__(
        self,
        cache: PrefixCache,
        tier: DiskTier,
        copier: BlockCopier,
        costs: Callable[[], PrefillCosts],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """costs: what computing a prompt takes, as is known by now. clock: monotonic seconds."""
        self.tier = tier
        self.num_hit_tokens = 0
        """Prompt tokens that requests did not compute because of the tier, since the start."""
        self.num_late = 0
        """Loads that were given up because they took too long."""
        self._cache = cache
        self._copier = copier
        self._costs = costs
        self._clock = clock
        self._loads: dict[Key, _Load] = {}
        self._leaders: dict[bytes, _Load] = {}
        """By each digest that is being read."""
        self._following: dict[Key, _Load] = {}
        self._done: dict[Key, Sequence] = {}
        """Those whose load ended since the last `advance`."""
        self._tried: dict[Key, int] = {}
        """How often an open sequence had been preempted when the tier was last asked for it."""
        self._loaded: dict[Key, tuple[int, int]] = {}
        """The blocks, from one to another, that its load brought to a sequence that waits."""
        self._worth: dict[Key, int] = {}
        """Blocks of a prompt that are to be written once they are computed."""
        self._num_queued: dict[Key, int] = {}
        """Those of them that were queued."""
        self._to_write: dict[bytes, None] = {}
        self._written_s = clock()
        """The last time when there was nothing to write, or a buffer for it."""

    @property
    def has_writes(self) -> bool:
        return bool(self._to_write)

    def is_loading(self, seq: Sequence) -> bool:
        """Whether a sequence is beside the queue."""
        return any(seq.key in keys for keys in (self._loads, self._following, self._done))

    def held_tables(self) -> Iterator[list[int]]:
        return (load.table for load in self._loads.values())

    # Reading

    def begin(self, seq: Sequence, table: list[int], num_spare: int) -> bool:
        """Begin to bring what follows the matched `table` of a sequence that would start. False
        where that is nothing, or not worth it. num_spare: blocks that nobody needs."""
        cache, first = self._cache, len(table)
        last = (seq.num_tokens - 1) // cache.block_size
        if first >= last or not cache.serves(seq):
            return False
        if self._tried.get(seq.key) == seq.num_preemptions:
            return False
        digest = cache.digest(seq, first)
        if (leader := self._leaders.get(digest)) is not None:
            leader.followers.append(seq)
            self._following[seq.key] = leader
            return True
        if not self.tier.has(digest):
            return False
        self._tried[seq.key] = seq.num_preemptions
        last = min(last, first + num_spare - cache.num_idle(table))
        end = first
        while end < last and self.tier.has(cache.digest(seq, end)):
            end += 1
        if not self._is_worth(first, end):
            return False
        digests = seq.block_digests[first:end]
        cache.hold(table)
        load = _Load(seq, list(table), first, end, self.tier.read(digests), self._clock())
        self._loads[seq.key] = load
        self._leaders.update(dict.fromkeys(digests, load))
        return True

    def advance(self, num_spare: int) -> list[Sequence]:
        """Copy what arrived into the pool. The sequences that wait no longer."""
        num_copies = COPIES_PER_STEP
        for load in list(self._loads.values()):
            while num_copies and (arrival := load.reading.take()) is not None:
                num_copies -= 1
                num_spare -= self._copy(load, arrival, max(0, num_spare))
            if load.reading.is_over or self._is_late(load):
                self._end(load)
        done, self._done = self._done, {}
        return list(done.values())

    def forget(self, seq: Sequence) -> None:
        """End what is kept for a sequence, which is finished."""
        key = seq.key
        if (load := self._loads.get(key)) is not None:
            self._end(load)
        if (leader := self._following.pop(key, None)) is not None:
            leader.followers.remove(seq)
        self._done.pop(key, None)
        for kept in (self._tried, self._loaded, self._worth, self._num_queued):
            kept.pop(key, None)

    def wait(self) -> None:
        """Wait until something was read or written, for a short time."""
        if any(load.reading.is_ready for load in self._loads.values()):
            return
        left_s = min((self._patience_left_s(load) for load in self._loads.values()), default=WAIT_S)
        self.tier.wait(max(0.0, min(WAIT_S, left_s)))

    def _is_worth(self, first: int, end: int) -> bool:
        size = self._cache.block_size
        num_bytes = (end - first) * self.tier.record_bytes
        return end > first and is_worth_reading(
            self._costs(), self.tier.costs, start=first * size, end=end * size, num_bytes=num_bytes
        )

    def _is_late(self, load: _Load) -> bool:
        is_late = self._patience_left_s(load) < 0
        self.num_late += is_late
        return is_late

    def _patience_left_s(self, load: _Load) -> float:
        size = self._cache.block_size
        start, arrived, end = (each * size for each in (load.start, len(load.table), load.end))
        most_s = patience_s(self._costs(), start=start, arrived=arrived, end=end)
        return load.started_s + most_s - self._clock()

    def _copy(self, load: _Load, arrival: Arrival, num_spare: int) -> int:
        """Put what arrived into blocks; the load is over where there is no room for it. How many
        blocks were taken."""
        cache, first = self._cache, len(load.table)
        digests = load.seq.block_digests[first : first + len(arrival.rows)]
        blocks: list[int] = []
        new: dict[int, int] = {}
        for row, digest in enumerate(digests[:num_spare]):
            block = cache.find(digest)
            if block is None:
                new[row] = block = cache.allocate()
            else:
                cache.hold([block])
            blocks.append(block)
        if new:
            self._copier.scatter([*new.values()], arrival.rows[[*new]])
        for row, block in new.items():  # not before its content is there
            cache.register_loaded(digests[row], block, first + row)
        arrival.give_back()
        load.table += blocks
        if len(blocks) < len(digests):
            load.reading.cancel()
        return len(blocks)

    def _end(self, load: _Load) -> None:
        key = load.seq.key
        load.reading.cancel()
        for digest in load.seq.block_digests[load.start : load.end]:
            if self._leaders.get(digest) is load:
                del self._leaders[digest]
        self._cache.unhold(load.table)
        if len(load.table) > load.start:
            self._loaded[key] = (load.start, len(load.table))
        del self._loads[key]
        for follower in load.followers:
            del self._following[follower.key]
        self._done |= {seq.key: seq for seq in (load.seq, *load.followers)}

    # Writing

    def started(self, seq: Sequence, cached_tokens: int, seen_tokens: int) -> int:
        """Note what of a prompt is used again, as it was found when it was first started; how many
        of the cached tokens its load brought."""
        size = self._cache.block_size
        self._worth[seq.key] = num_worth_keeping(cached_tokens, seen_tokens, size)
        first, end = self._loaded.pop(seq.key, (0, 0))
        num_tokens = max(0, min(cached_tokens, end * size) - first * size)
        self.num_hit_tokens += num_tokens
        return num_tokens

    def computed(self, seq: Sequence) -> None:
        """Queue those of its blocks to be written that are registered and worth it."""
        key = seq.key
        worth = self._worth.get(key)
        if worth is None:
            return
        first, end = self._num_queued.get(key, 0), min(worth, seq.num_registered_blocks)
        for digest in seq.block_digests[first:end]:
            if self.tier.takes(digest):
                self._to_write[digest] = None
        self._num_queued[key] = end
        if end >= worth:
            del self._worth[key], self._num_queued[key]

    def write(self) -> None:
        """Copy blocks that are to be written, as many as there is room for between two steps."""
        now_s = self._clock()
        is_stuck = now_s - self._written_s > STUCK_S
        if not self._to_write:
            self._written_s = now_s
        elif is_stuck or not self.tier.is_on:
            self._to_write.clear()
        for _ in range(COPIES_PER_STEP):
            if not self._to_write or (buffer := self.tier.write_buffer()) is None:
                return
            self._written_s = now_s
            digests: list[bytes] = []
            blocks: list[int] = []
            while self._to_write and len(blocks) < len(buffer.rows):
                digest = next(iter(self._to_write))
                del self._to_write[digest]
                block = self._cache.find(digest)
                if block is not None and self.tier.takes(digest):
                    digests.append(digest)
                    blocks.append(block)
            if not blocks:
                self.tier.give_back(buffer)
                return
            wait = self._copier.gather(blocks, self.tier.payloads(buffer, len(blocks)))
            self.tier.put(buffer, digests, wait)
