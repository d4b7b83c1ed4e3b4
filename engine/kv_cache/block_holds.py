"""Keeps blocks for other engines that read them, for a bounded time, and tells when a block's
content is no longer what it was.

Who reads from afar is never waited for: it is told a generation with each block, which is raised
before the block can be handed out again. The same generation before and after a copy means that
nobody wrote meanwhile, held or not. A hold only makes it likely that the copy succeeds: it keeps
blocks from being evicted, until it is released, its time is over, or the bound on all is reached.

`find`, `begin` and `release` are for any thread; the blocks themselves are touched by the thread
of the prefix cache alone, in `advance`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple, Protocol

from engine.kv_cache.prefix_cache import PrefixCache

MAX_HOLDS = 256
"""As many at once; who asks for more is told where the blocks are, and nothing is kept."""
MAX_HOLD_S = 30.0
HELD_SHARE = 8
"""Holds keep one part in so many of all blocks at most."""


class Generations(Protocol):
    """A number for each block, of 64 bits."""

    def __getitem__(self, block: int, /) -> int: ...

    def __setitem__(self, block: int, generation: int, /) -> None: ...


class BlockRange(NamedTuple):
    """Blocks of the front of a prompt, and the generation of each."""

    blocks: list[int]
    generations: list[int]


class _Hold(NamedTuple):
    front: BlockRange
    ends_s: float


def raise_generation(generations: Generations, block: int) -> None:
    """Note that a block's content is given up: before anybody may write to it."""
    generations[block] += 1


class BlockHolds:
    """The holds on the blocks of one prefix cache."""

    def __init__(
        self,
        cache: PrefixCache,
        generations: Generations,
        *,
        max_blocks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """generations: of each block, raised for each that becomes free. max_blocks: kept at most,
        so few that the longest sequence fits beside them. clock: monotonic seconds."""
        self.num_expired = 0
        """Holds that nobody released, since the start."""
        self._cache = cache
        self._generations = generations
        self._max_blocks = max_blocks
        self._clock = clock
        self._lock = threading.Lock()
        self._holds: dict[int, _Hold] = {}
        """Those that were asked for and are not over."""
        self._num_begun = 0
        self._tables: dict[int, list[int]] = {}
        """The blocks that are kept, by hold; of the cache's thread."""

    @property
    def num_blocks(self) -> int:
        """Blocks that holds keep, each counted once for each hold."""
        return sum(map(len, self._tables.values()))

    def tables(self) -> Iterator[list[int]]:
        return iter(self._tables.values())

    # For any thread

    def find(self, digests: Sequence[bytes]) -> BlockRange:
        """Return the longest front of these blocks that is cached. A generation that was raised
        meanwhile is told as it was or as it is: whoever copies finds the difference."""
        blocks: list[int] = []
        generations: list[int] = []
        for digest in digests:
            block = self._cache.find(digest)
            if block is None:
                break
            generation = self._generations[block]
            if self._cache.find(digest) != block:  # evicted, and perhaps another's by now
                break
            blocks.append(block)
            generations.append(generation)
        return BlockRange(blocks, generations)

    def begin(self, front: BlockRange, duration_s: float) -> int:
        """Ask for blocks to be kept, from the next step on. Return the id of the hold; 0: there are
        too many."""
        if not duration_s < MAX_HOLD_S:  # as what is no number is not
            duration_s = MAX_HOLD_S
        ends_s = self._clock() + duration_s
        with self._lock:
            if len(self._holds) >= MAX_HOLDS:
                return 0
            self._num_begun += 1
            self._holds[self._num_begun] = _Hold(front, ends_s)
            return self._num_begun

    def is_held(self, hold_id: int) -> bool:
        """Whether a hold was begun and is not over."""
        return hold_id in self._holds

    def release(self, hold_id: int) -> None:
        """End a hold; one that is over is left so."""
        with self._lock:
            self._holds.pop(hold_id, None)

    # For the thread of the cache

    def advance(self) -> None:
        """Keep what was asked for since the last call, and no longer what is over."""
        if not self._holds and not self._tables:
            return
        now_s = self._clock()
        with self._lock:
            for hold_id in [key for key, each in self._holds.items() if each.ends_s <= now_s]:
                del self._holds[hold_id]
                self.num_expired += 1
            holds = dict(self._holds)
        for hold_id in [key for key in self._tables if key not in holds]:
            self._cache.unhold(self._tables.pop(hold_id))
        for hold_id, hold in holds.items():
            if hold_id not in self._tables:
                self._keep(hold_id, hold.front)

    def _keep(self, hold_id: int, front: BlockRange) -> None:
        told = zip(front.blocks, front.generations, strict=True)
        found = [block for block, _ in takewhile(self._is_same, told)]
        table = found[: max(0, self._max_blocks - self.num_blocks)]
        self._cache.hold(table)
        self._tables[hold_id] = table

    def _is_same(self, told: tuple[int, int]) -> bool:
        block, generation = told
        return self._generations[block] == generation
