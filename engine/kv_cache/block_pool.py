"""The KV cache's blocks as numbers: which are free, and how many block tables hold each other one.

Knows no tokens and no content.

A block is in one of three states, told apart by its reference count:

    free   (-1)   allocate() may hand it out
    idle   (0)    no table holds it, its content is kept by whoever released it
    held   (>0)   that many block tables hold it

    free --allocate--> held --unref--> idle --free--> free;  idle --ref--> held
"""

from __future__ import annotations

from collections.abc import Callable

_FREE = -1


class BlockPool:
    """Blocks 0..num_blocks-1. Every operation is O(1); a wrong one is a programmer's error and
    raises AssertionError or IndexError."""

    def __init__(self, num_blocks: int, *, on_free: Callable[[int], None] | None = None) -> None:
        """on_free: told of every block that becomes free, before it can be handed out again."""
        assert num_blocks >= 1, f"num_blocks must be at least 1, not {num_blocks}"
        self.num_blocks = num_blocks
        self._refcounts = [_FREE] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._on_free = on_free

    @property
    def num_free(self) -> int:
        return len(self._free)

    def refcount(self, block: int) -> int:
        """How many tables hold `block`; 0 when idle. The block must not be free."""
        count = self._refcounts[block]
        assert count != _FREE, f"block {block} is free"
        return count

    def allocate(self) -> int:
        """A free block, now held once. IndexError when there is none: ask `num_free` before."""
        block = self._free.pop()
        self._refcounts[block] = 1
        return block

    def ref(self, block: int) -> int:
        """One more table holds `block`, which is held or idle. Returns the new count."""
        count = self.refcount(block) + 1
        self._refcounts[block] = count
        return count

    def unref(self, block: int) -> int:
        """One table less holds `block`. Returns the new count; at 0 the block is idle, not free."""
        count = self._refcounts[block] - 1
        assert count >= 0, f"block {block} is not held"
        self._refcounts[block] = count
        return count

    def free(self, block: int) -> None:
        """Make an idle block free."""
        assert self._refcounts[block] == 0, f"block {block} is not idle"
        self._refcounts[block] = _FREE
        if self._on_free is not None:
            self._on_free(block)
        self._free.append(block)

    def check_integrity(self) -> None:
        """AssertionError unless the free list and the counts tell one story. O(num_blocks)."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice on the free list"
        for block, count in enumerate(self._refcounts):
            assert count >= _FREE, f"block {block} has refcount {count}"
            assert (count == _FREE) == (block in free), f"block {block}: refcount {count}"
