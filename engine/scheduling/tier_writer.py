"""Copies blocks of the pool to a tier, between two steps: those that prompts use again, or those
that the pool is about to evict.

A block that leaves the pool before its turn is not written: what it held is computed once more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.kv_cache.prefix_cache import PrefixCache
from engine.tiers.sources import Tier

COPIES_PER_STEP = 8
"""Buffers that are copied out of the pool, or into it, between two steps at most."""
STUCK_S = 10.0
"""A tier that takes nothing for so long is not waited for: what was to be written is dropped."""
LOOKS_PER_WINDOW = 16
"""The blocks to be evicted next are looked over each time that one part in so many of them may be
others."""


class BlockCopier(Protocol):
    """Copies whole blocks of the pool, all layers of each, out of it and into it."""

    def gather(self, blocks: Items[int], rows: NDArray[np.uint8]) -> Callable[[], None]:
        """Begin to fill `rows` [blocks, block_bytes]. The result returns when they are filled; the
        blocks may be written to before."""

    def scatter(self, blocks: Items[int], rows: NDArray[np.uint8]) -> None:
        """Fill blocks from `rows`, which are the caller's again at the return; rows that a device
        reads by itself, those of the host tier, only in the order of the device."""


class TierWriter:
    """Writes to one tier."""

    def __init__(
        self,
        tier: Tier,
        cache: PrefixCache,
        copier: BlockCopier,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tier = tier
        self._cache = cache
        self._copier = copier
        self._clock = clock
        self._queued: dict[bytes, None] = {}
        self._written_s = clock()
        """The last time when there was nothing to write, or a buffer for it."""

    @property
    def has_writes(self) -> bool:
        return bool(self._queued)

    def queue(self, digests: Iterable[bytes]) -> None:
        """Have blocks written, in this order, that the tier lacks."""
        takes = self.tier.takes
        self._queued |= {digest: None for digest in digests if takes(digest)}

    def write(self) -> None:
        """Copy queued blocks, as many as there is room for between two steps."""
        now_s = self._clock()
        is_stuck = now_s - self._written_s > STUCK_S
        if not self._queued:
            self._written_s = now_s
        elif is_stuck or not self.tier.is_on:
            self._queued.clear()
        for _ in range(COPIES_PER_STEP):
            if not self._queued or (buffer := self.tier.write_buffer()) is None:
                return
            self._written_s = now_s
            digests: list[bytes] = []
            blocks: list[int] = []
            while self._queued and len(blocks) < len(buffer.rows):
                digest = next(iter(self._queued))
                del self._queued[digest]
                block = self._cache.find(digest)
                if block is not None and self.tier.takes(digest):
                    digests.append(digest)
                    blocks.append(block)
            if not blocks:
                self.tier.give_back(buffer)
                return
            wait = self._copier.gather(blocks, self.tier.payloads(buffer, len(blocks)))
            self.tier.put(buffer, digests, wait)


class EvictionWatch:
    """Finds the blocks that the pool evicts next, before it does: they are copied in large parts,
    and no eviction waits for a copy."""

    def __init__(self, cache: PrefixCache, window: int) -> None:
        """window: how many of the next blocks to be handed out are to be ready for it."""
        assert window >= 1
        self._cache = cache
        self._window = window
        self._looked_at = (0, 0)

    def find(self) -> list[bytes]:
        """Return the digests of those that are next in line; nothing, where that would be as at the
        last call but for a few."""
        cache, num_few = self._cache, max(1, self._window // LOOKS_PER_WINDOW)
        num_free, num_idle = cache.pool.num_free, cache.num_idle_blocks
        handed_out, idle = self._looked_at
        is_as_before = abs(cache.num_evictions - num_free - handed_out) < num_few
        if num_free >= self._window or (is_as_before and abs(num_idle - idle) < num_few):
            return []
        self._looked_at = cache.num_evictions - num_free, num_idle
        return cache.next_evicted(self._window - num_free)
