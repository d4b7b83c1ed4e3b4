"""Writes the table of who has what (`gateway.fleet.kv_index`), the only one in its home that does.

A key stays in its slot when nobody has it any more: another one there would show a reader who is
just looking at it the wrong holders. Where such slots and those in use come to half of all, what is
in use moves to a table of its own, four times as large as that, which takes the other's place.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gateway.fleet.kv_index import (
    AT_CAPACITY,
    AT_DIRECTORY,
    AT_DIRECTORY_VERSION,
    AT_DROPPED,
    AT_LAG_US,
    AT_MAGIC,
    AT_REPLACED,
    AT_SLOTS,
    AT_SPANS,
    AT_TOLD_MS,
    DIRECTORY_WORDS,
    MAGIC,
    MAX_PROBES,
    PLACES,
    SLOT_WORDS,
    WORD_BYTES,
    engine_digest,
    table_bytes,
)

log = logging.getLogger(__name__)

MIN_CAPACITY = 1 << 12
MAX_CAPACITY = 1 << 23
"""200 MB, for 4 million spans of 128 tokens."""
SPARE = 4
"""A new table has so many slots for each span in it."""
MASK_BITS = 64

Words = NDArray[np.uint64]
Indexes = NDArray[np.int64]


class KvIndexWriter:
    """A table of its own beside the one at `path`, whose place it takes when `publish` is called.
    `clock`: Unix seconds."""

    def __init__(
        self,
        path: Path,
        *,
        min_capacity: int = MIN_CAPACITY,
        max_capacity: int = MAX_CAPACITY,
        clock: Callable[[], float] = time.time,
    ) -> None:
        assert MASK_BITS <= min_capacity <= max_capacity and not min_capacity & (min_capacity - 1)
        self._path, self._clock = path, clock
        self._min_capacity, self._max_capacity = min_capacity, max_capacity
        self._places: dict[str, int] = {}
        """By the id of each engine's process."""
        self._sizes: dict[str, int] = {}
        """The spans that each may have."""
        self._is_published = False
        self._num_used = 0
        """Slots that have a key."""
        self._words = self._create(min_capacity)

    @property
    def num_spans(self) -> int:
        return int(self._words[AT_SPANS])

    @property
    def capacity(self) -> int:
        return int(self._words[AT_CAPACITY])

    def publish(self) -> None:
        """Show the table to readers, in the place of one that an earlier process left."""
        if not self._is_published:
            self._is_published = True
            self._take_path()

    def add(self, engine_id: str, num_spans: int) -> bool:
        """Give an engine a place, where nothing of it is known yet, and make room for as many spans
        as it may have. False: all places are taken."""
        free = set(range(PLACES)).difference(self._places.values())
        if not free:
            return False
        self._places[engine_id] = min(free)
        self._sizes[engine_id] = num_spans
        if (most := sum(self._sizes.values())) > self.capacity // 2:
            self._move(most)
        self._list()
        return True

    def drop(self, engine_id: str) -> None:
        """Forget an engine and all that it had: from now on it has no place."""
        place = self._places.pop(engine_id)
        del self._sizes[engine_id]
        self._list()
        self._clear(place)

    def clear(self, engine_id: str) -> None:
        """Forget what an engine has: all of it is told anew."""
        self._clear(self._places[engine_id])

    def store(self, engine_id: str, packed: bytes) -> None:
        """Note the spans that an engine has from now on, by their keys as they are told."""
        word, bit = self._bit(self._places[engine_id])
        keys = self._bounded(_parsed(packed))
        slots, empty = self._find(keys)
        self._set(slots[slots >= 0], word, bit)
        is_new = slots < 0
        masks: Words = np.zeros((np.count_nonzero(is_new), SLOT_WORDS - 1), dtype=np.uint64)
        masks[:, word - 1] = bit
        self._insert(keys[is_new], masks, empty[is_new])

    def remove(self, engine_id: str, packed: bytes) -> None:
        """Note the spans that an engine has no more."""
        word, bit = self._bit(self._places[engine_id])
        slots, _ = self._find(_parsed(packed))
        self._unset(slots[slots >= 0], word, bit)

    def told(self, lag_s: float | None = None) -> None:
        """Note that the writer is at work. `lag_s`: of the change that it has just written."""
        self._words[AT_TOLD_MS] = int(self._clock() * 1e3)
        if lag_s is not None:
            self._words[AT_LAG_US] = int(max(0.0, lag_s) * 1e6)

    # ---- one place

    def _bit(self, place: int) -> tuple[int, np.uint64]:
        """Return which word of a slot has the bit of a place, and the bit."""
        return 1 + place // MASK_BITS, np.uint64(1 << place % MASK_BITS)

    def _list(self) -> None:
        """Write the directory. Who has left stands in it no more before what it had is cleared."""
        listed: Words = np.zeros(PLACES * DIRECTORY_WORDS, dtype=np.uint64)
        for engine_id, place in self._places.items():
            digest = struct.unpack(f"<{DIRECTORY_WORDS}Q", engine_digest(engine_id))
            listed[DIRECTORY_WORDS * place : DIRECTORY_WORDS * (place + 1)] = digest
        self._words[AT_DIRECTORY : AT_DIRECTORY + len(listed)] = listed
        self._words[AT_DIRECTORY_VERSION] += np.uint64(1)

    def _clear(self, place: int) -> None:
        word, bit = self._bit(place)
        self._unset(np.flatnonzero(self._slots[:, word] & bit), word, bit)

    # ---- slots

    def _find(self, keys: Words) -> tuple[Indexes, Indexes]:
        """Return the slot of each key, -1 where it has none, and then the slot that ended the
        search, -1 where there are too many others before."""
        found = np.full(len(keys), -1, dtype=np.int64)
        empty = np.full(len(keys), -1, dtype=np.int64)
        left = np.arange(len(keys))
        at = (keys & np.uint64(self.capacity - 1)).astype(np.int64)
        for _ in range(MAX_PROBES):
            if not len(left):
                break
            seen = self._slots[at, 0]
            is_it, is_empty = seen == keys[left], seen == 0
            found[left[is_it]] = at[is_it]
            empty[left[is_empty]] = at[is_empty]
            goes_on = ~(is_it | is_empty)
            left, at = left[goes_on], at[goes_on] + 1
        return found, empty

    def _set(self, slots: Indexes, word: int, bit: np.uint64) -> None:
        is_new = (self._slots[slots, 1] | self._slots[slots, 2]) == 0
        self._slots[slots, word] |= bit
        self._words[AT_SPANS] += np.uint64(np.count_nonzero(is_new))

    def _unset(self, slots: Indexes, word: int, bit: np.uint64) -> None:
        slots = slots[(self._slots[slots, word] & bit) != 0]
        self._slots[slots, word] &= ~bit
        is_gone = (self._slots[slots, 1] | self._slots[slots, 2]) == 0
        self._words[AT_SPANS] -= np.uint64(np.count_nonzero(is_gone))

    def _insert(self, keys: Words, masks: Words, empty: Indexes) -> None:
        """Put keys where their search ended; of two that came to one slot the other goes on."""
        while len(keys):
            fits = empty >= 0
            self._drop_keys(len(keys) - int(np.count_nonzero(fits)))
            keys, masks, empty = keys[fits], masks[fits], empty[fits]
            slots, first = np.unique(empty, return_index=True)
            self._slots[slots, 1:] = masks[first]
            self._slots[slots, 0] = keys[first]
            self._num_used += len(slots)
            self._words[AT_SPANS] += np.uint64(len(slots))
            keys, masks = np.delete(keys, first), np.delete(masks, first, axis=0)
            _, empty = self._find(keys)

    def _bounded(self, keys: Words) -> Words:
        """Return the keys that there is room for, having made room where that helps."""
        if 2 * (self._num_used + len(keys)) <= self.capacity:
            return keys
        num_idle = self._num_used - self.num_spans
        if self.capacity < self._max_capacity or num_idle >= self.capacity // 8:
            self._move(self.num_spans + len(keys))
        room = max(0, self.capacity // 2 - self._num_used)
        self._drop_keys(max(0, len(keys) - room))
        return keys[:room]

    def _drop_keys(self, number: int) -> None:
        if number and not self._words[AT_DROPPED]:
            log.warning("the index of cached prefixes is full: spans are left out from now on")
        self._words[AT_DROPPED] += np.uint64(number)

    # ---- tables

    def _create(self, capacity: int) -> Words:
        """Make an empty table in a file that has no name yet that readers know."""
        self._fresh = self._path.with_name(f"{self._path.name}.new")
        self._fresh.unlink(missing_ok=True)  # it may be the one that is mapped: not to be emptied
        with self._fresh.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, table_bytes(capacity))
            mapped = mmap.mmap(file.fileno(), table_bytes(capacity))
        words: Words = np.frombuffer(mapped, dtype=np.uint64)
        words[AT_MAGIC], words[AT_CAPACITY] = MAGIC, capacity
        end = AT_SLOTS + SLOT_WORDS * (capacity + MAX_PROBES)
        self._slots = words[AT_SLOTS:end].reshape(-1, SLOT_WORDS)
        return words

    def _move(self, num_spans: int) -> None:
        """Take what is in use to a table with room for so many spans."""
        capacity = self._min_capacity
        while capacity < min(SPARE * num_spans, self._max_capacity):
            capacity *= 2
        old = self._words
        rows = self._slots[(self._slots[:, 1] | self._slots[:, 2]) != 0]
        self._words, self._num_used = self._create(capacity), 0
        self._words[AT_DIRECTORY_VERSION:AT_SLOTS] = old[AT_DIRECTORY_VERSION:AT_SLOTS]
        self._words[AT_SPANS] = 0
        _, empty = self._find(rows[:, 0])
        self._insert(rows[:, 0], rows[:, 1:], empty)
        if self._is_published:
            self._take_path()
            old[AT_REPLACED] = 1

    def _take_path(self) -> None:
        replaced = None
        try:
            with self._path.open("r+b") as file:
                replaced = mmap.mmap(file.fileno(), WORD_BYTES * AT_SLOTS)
        except (OSError, ValueError):  # there is none, or it was cut
            pass
        self._fresh.replace(self._path)
        if replaced is not None:
            start = WORD_BYTES * AT_REPLACED
            replaced[start : start + WORD_BYTES] = struct.pack("<Q", 1)
            replaced.close()


def _parsed(packed: bytes) -> Words:
    """Return each key once. One that is 0 would be an empty slot."""
    keys: Words = np.unique(np.frombuffer(packed, dtype=np.uint64))
    found: Words = keys[keys != np.uint64(0)]
    return found
