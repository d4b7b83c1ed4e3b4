"""Tells which engines have the beginning of a prompt cached: the table that a home's conductor
writes, read by any process that maps it.

    header | directory: the engine at each of PLACES places | slots of (key, mask, mask)

A slot has the key of a span (`engine.prefix_digests`) and a bit for each place whose engine has it.
A key's slot is the first one at or behind `key % capacity` that has it; a slot that has none ends
the search. The writer sets a slot's masks before its key and never writes another key there: so
whoever reads beside it sees each holder or does not, and never another span's. A table that is too
full is replaced by another file at its path, and says so in its header.

Of an engine without a sliding window who has a span has those before it, so the longest prefix of
each is found by doubling and halving; with a window all spans are looked at.

What is read is a guess: an engine may have evicted it since, and may have computed more.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import accumulate
from operator import and_
from pathlib import Path
from typing import NamedTuple

PLACES = 128
"""How many engines a table knows at most: 64 for each mask."""
MAX_PROBES = 256
"""So many slots behind its own a key may stand; at most half of all are in use."""
WORD_BYTES = 8
SLOT_WORDS = 3
MAGIC = int.from_bytes(b"kvindex1", "little")
LOOK_AGAIN_S = 1.0
"""How often the path is looked at: for a table that is not there, and for one of a writer that died
before it could tell readers of the last one that theirs is replaced."""
MAX_KNOWN_FLEETS = 64

# The words of the header.
AT_MAGIC, AT_CAPACITY, AT_REPLACED, AT_DIRECTORY_VERSION = 0, 1, 2, 3
AT_SPANS, AT_LAG_US, AT_TOLD_MS, AT_DROPPED = 4, 5, 6, 7
AT_DIRECTORY = 16
DIRECTORY_WORDS = 2
AT_SLOTS = 512
assert AT_DIRECTORY + PLACES * DIRECTORY_WORDS <= AT_SLOTS


class NoTable(Exception):
    """There is no table at a path, or none that this version can read."""


class IndexState(NamedTuple):
    """Says how an index is."""

    spans: int
    """Spans that somebody has, each counted once."""
    lag_s: float
    """From an engine's change to its place here, of the latest change."""
    silent_s: float
    """Since the writer was last heard of."""


def table_bytes(capacity: int) -> int:
    return WORD_BYTES * (AT_SLOTS + SLOT_WORDS * (capacity + MAX_PROBES))


def engine_digest(engine_id: str) -> bytes:
    """Return the name of an engine's process in the directory: 16 bytes, never all zero."""
    return blake2b(engine_id.encode(), digest_size=DIRECTORY_WORDS * WORD_BYTES).digest()


def map_table(path: Path) -> memoryview:
    """Return the words of the table at `path`, mapped to be read. Raises: NoTable."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        words = memoryview(mapped).cast("Q")
    except (OSError, ValueError, TypeError) as error:  # also of a file without whole words
        raise NoTable(str(error)) from error
    if len(words) < AT_SLOTS or words[AT_MAGIC] != MAGIC:
        raise NoTable(f"{path} is no table of this version")
    if len(mapped) < table_bytes(words[AT_CAPACITY]):
        raise NoTable(f"{path} was cut")
    return words


class KvIndex:
    """Reads the table at `path`, be it there or not. `clock`: monotonic seconds."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._words: memoryview | None = None
        self._file: tuple[int, int] | None = None
        """The device and the inode of the table's file."""
        self._look_from = 0.0
        self._mask = 0
        self._directory_version = -1
        self._fleets: dict[tuple[str, ...], tuple[list[int], int]] = {}
        """By the engines that were asked for: the place of each (-1: none) and the mask of all."""

    def spans_held(
        self,
        keys: Sequence[int],
        engine_ids: tuple[str, ...],
        *,
        sliding_window: int | None = None,
        span_tokens: int = 128,
    ) -> list[int]:
        """Return how many spans of a prompt, from the first on, each of these engines has cached.
        `sliding_window`: of their model, in tokens."""
        words = self._current()
        if words is None or not keys:
            return [0] * len(engine_ids)
        places, wanted = self._places_of(words, engine_ids)
        if not wanted:
            return [0] * len(engine_ids)
        longest: dict[int, int] = {}
        if sliding_window is None:
            ends = self._prefix_ends(words, keys, wanted)
        else:
            ends = self._window_ends(words, keys, wanted, -(-(sliding_window - 1) // span_tokens))
        for num_spans, mask in ends:
            while mask:
                lowest = mask & -mask
                longest[lowest.bit_length() - 1] = num_spans
                mask ^= lowest
        return [longest.get(place, 0) for place in places]

    @property
    def silent_s(self) -> float:
        """Return for how long its writer was not heard of; infinite where there is no table."""
        words = self._current()
        return math.inf if words is None else max(0.0, time.time() - words[AT_TOLD_MS] / 1e3)

    def state(self) -> IndexState | None:
        """Return how the index is; None: there is none."""
        words = self._current()
        if words is None:
            return None
        return IndexState(words[AT_SPANS], words[AT_LAG_US] / 1e6, self.silent_s)

    def _current(self) -> memoryview | None:
        """Return the table at the path, at most LOOK_AGAIN_S after it came there."""
        words, now_s = self._words, self._clock()
        is_replaced = words is not None and bool(words[AT_REPLACED])
        if now_s < self._look_from and not (is_replaced and self._file):
            return words
        self._look_from = now_s + LOOK_AGAIN_S
        file = _file_at(self._path)
        if not is_replaced and file is not None and file == self._file:
            return words
        try:
            self._words = words = map_table(self._path)
        except NoTable:  # what was replaced is better than nothing
            self._file = None
        else:
            # If another file took the path meanwhile, that is noticed at the next look.
            self._file = file
            self._mask, self._directory_version = words[AT_CAPACITY] - 1, -1
        return words

    def _places_of(self, words: memoryview, engine_ids: tuple[str, ...]) -> tuple[list[int], int]:
        version = words[AT_DIRECTORY_VERSION]
        if version != self._directory_version or len(self._fleets) > MAX_KNOWN_FLEETS:
            self._fleets.clear()
            self._directory_version = version
        found = self._fleets.get(engine_ids)
        if found is None:
            listed = words[AT_DIRECTORY : AT_DIRECTORY + PLACES * DIRECTORY_WORDS].tobytes()
            size = DIRECTORY_WORDS * WORD_BYTES
            at = {listed[size * place : size * (place + 1)]: place for place in range(PLACES)}
            places = [at.get(engine_digest(each), -1) for each in engine_ids]
            mask = sum({1 << place for place in places if place >= 0})
            found = self._fleets[engine_ids] = (places, mask)
        return found

    def _holders(self, words: memoryview, key: int) -> int:
        """Return the mask of the places whose engines have a span."""
        at = AT_SLOTS + SLOT_WORDS * (key & self._mask)
        if words[at] != key:
            end = at + SLOT_WORDS * MAX_PROBES
            while (seen := words[at]) != key:
                at += SLOT_WORDS
                if not seen or at == end:
                    return 0
        return words[at + 1] | words[at + 2] << 64

    def _prefix_ends(
        self, words: memoryview, keys: Sequence[int], wanted: int
    ) -> list[tuple[int, int]]:
        """Return pairs of a number of spans and the places of which this is the longest prefix."""
        holders, last_key = self._holders, len(keys) - 1
        ends: list[tuple[int, int]] = []
        low, held_low = 0, holders(words, keys[0]) & wanted
        step = 1
        while held_low and low < last_key:
            high = min(low + step, last_key)
            held_high = holders(words, keys[high]) & held_low
            if held_high != held_low:
                self._halve(words, keys, (low, held_low, high, held_high), ends)
            low, held_low, step = high, held_high, 2 * step
        if held_low:
            ends.append((low + 1, held_low))
        return ends

    def _halve(
        self,
        words: memoryview,
        keys: Sequence[int],
        part: tuple[int, int, int, int],
        ends: list[tuple[int, int]],
    ) -> None:
        """Find the prefixes that end within a part of a prompt: two spans and who has each."""
        holders = self._holders
        parts = [part]
        while parts:
            low, held_low, high, held_high = parts.pop()
            if high - low == 1:
                ends.append((high, held_low ^ held_high))
                continue
            middle = (low + high) >> 1
            held = holders(words, keys[middle]) & held_low | held_high
            if held != held_high:
                parts.append((middle, held, high, held_high))
            if held != held_low:
                parts.append((low, held_low, middle, held))

    def _window_ends(
        self, words: memoryview, keys: Sequence[int], wanted: int, most: int
    ) -> list[tuple[int, int]]:
        """As `_prefix_ends`, where a prefix is had whose last `most` spans are (or all)."""
        held = [self._holders(words, key) & wanted for key in keys]
        if not most:  # a window of one token: nothing of what is before is seen
            return [(len(keys), wanted)]
        ends: list[tuple[int, int]] = []
        forward: list[int] = []
        backward: list[int] = []
        for start in range(0, len(held), most):
            chunk = held[start : start + most]
            forward += accumulate(chunk, and_)
            backward += [*accumulate(reversed(chunk), and_)][::-1]
        left = wanted
        for index in range(len(keys) - 1, -1, -1):
            visible = forward[index]
            if index >= most:
                visible &= backward[index - most + 1]
            if now := visible & left:
                ends.append((index + 1, now))
                left &= ~now
                if not left:
                    break
        return ends


def _file_at(path: Path) -> tuple[int, int] | None:
    """Return the device and the inode of a file; None: there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
