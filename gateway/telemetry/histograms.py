"""Keeps histograms in memory that workers share: classic buckets, native ones beside them, and for
each classic bucket one exemplar.

prometheus-client has no native buckets, and where several processes measure it drops exemplars. An
observation here adds to three numbers of a mapped file, without a lock: each worker writes to a
file of its own from one thread, and a scrape of any worker adds the files up.

A file is a sequence of records, one for each label set, 8-byte aligned:

    u32 size of the record, u32 bytes of the key, u32 classic buckets, u32 native buckets
    key: JSON, [name, [label values]]
    f64 sum; u64 of each classic bucket, the last one +Inf; u64 of the zero bucket and each native
    one; an exemplar for each classic bucket: f64 value, f64 Unix seconds, trace id, u32 CRC-32

before which stands how many of its bytes are in use. That number grows last.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from math import ceil, log2
from operator import add
from pathlib import Path
from typing import NamedTuple

import msgspec

from gateway.telemetry.shared_files import MAX_KEYS, reserve

SCHEMA = 3
"""Native buckets: eight for each doubling, each 9 % wider than the one before."""
BUCKETS_PER_DOUBLING = 1 << SCHEMA
LEAST_EXPONENT, MOST_EXPONENT = -14, 12
"""Native buckets reach from 61 microseconds, below which all counts as zero, to 4,096 seconds; what
is more counts as that."""
ZERO_THRESHOLD = 2.0**LEAST_EXPONENT
FIRST_INDEX = LEAST_EXPONENT * BUCKETS_PER_DOUBLING + 1
"""The bucket above the threshold: index i holds (2^((i-1)/8), 2^(i/8)]."""
NUM_NATIVE = (MOST_EXPONENT - LEAST_EXPONENT) * BUCKETS_PER_DOUBLING + 1
"""With the zero bucket, which comes first."""
FILE_BYTES = 4 * 1024 * 1024
"""Room for some 1,300 label sets."""
PREFIX, SUFFIX = "histograms_", ".shm"
OTHERS = ("-",)
"""The label of what comes when the file is full."""
HEAD = struct.Struct("<IIII")
USED = struct.Struct("<Q")
EXEMPLAR = struct.Struct("<dd16sI4x")
_key = msgspec.json.Decoder(tuple[str, tuple[str, ...]])


class Exemplar(msgspec.Struct, frozen=True):
    """One observation and the trace in which it was made. `at`: Unix seconds; `trace`: 32 hex
    digits."""

    value: float
    at: float
    trace: str


class HistogramSeries(msgspec.Struct):
    """The observations of one label set. `counts` and `natives` are those of each bucket alone."""

    labels: tuple[str, ...]
    total: float
    counts: list[int]
    natives: list[int]
    """Empty where nobody asked for them."""
    exemplars: list[Exemplar | None]

    @property
    def count(self) -> int:
        return sum(self.counts)

    def join(self, other: HistogramSeries) -> None:
        """Add what another worker observed; of two exemplars the newer one stays."""
        self.total += other.total
        self.counts = list(map(add, self.counts, other.counts))
        self.natives = list(map(add, self.natives, other.natives))
        self.exemplars = list(map(newer, self.exemplars, other.exemplars))


def newer(one: Exemplar | None, other: Exemplar | None) -> Exemplar | None:
    if one is None or other is None:
        return one or other
    return one if one.at >= other.at else other


class HistogramFamily(msgspec.Struct, frozen=True):
    """A histogram with its series, in the order of their labels."""

    name: str
    help: str
    label_names: tuple[str, ...]
    bounds: tuple[float, ...]
    """The upper bounds of the classic buckets, without +Inf."""
    series: list[HistogramSeries]


class HistogramMemory:
    """The memory that one process observes into. `path`: the file that a scrape of another process
    reads; None: no other process is asked."""

    def __init__(self, path: Path | None = None, size: int = FILE_BYTES) -> None:
        self._size = size
        self._map = mmap.mmap(-1, size) if path is None else map_file(path, size)
        self.floats = memoryview(self._map).cast("d")
        self.counts = memoryview(self._map).cast("Q")
        self._places: dict[bytes, int] = {}
        if self.used < USED.size:
            USED.pack_into(self._map, 0, USED.size)
        for key, start, _, _ in walk(self._map, self.used):
            self._places[key] = start  # of an earlier process of the same number

    @property
    def used(self) -> int:
        found: int = USED.unpack_from(self._map)[0]
        return found

    def place(self, key: bytes, num_bounds: int) -> int | None:
        """Return where the numbers of a label set begin, in units of 8 bytes; None: the file is
        full."""
        if key not in self._places:
            head = aligned(HEAD.size + len(key))
            size = head + 8 * (1 + num_bounds + 1 + NUM_NATIVE) + EXEMPLAR.size * (num_bounds + 1)
            start = self.used
            if start + size > self._size:
                return None
            HEAD.pack_into(self._map, start, size, len(key), num_bounds + 1, NUM_NATIVE)
            self._map[start + HEAD.size : start + HEAD.size + len(key)] = key
            USED.pack_into(self._map, 0, start + size)
            self._places[key] = start + head
        return self._places[key] // 8

    def write_exemplar(self, place: int, exemplar: Exemplar) -> None:
        trace = bytes.fromhex(exemplar.trace)
        content = struct.pack("<dd16s", exemplar.value, exemplar.at, trace)
        EXEMPLAR.pack_into(
            self._map, place, exemplar.value, exemplar.at, trace, zlib.crc32(content)
        )

    def content(self) -> bytes:
        return self._map[: self.used]


def map_file(path: Path, size: int) -> mmap.mmap:
    """Map a file whose space is taken now. Raises: OSError."""
    reserve(path, size)
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), size)


def aligned(size: int) -> int:
    return -(-size // 8) * 8


class Histogram:
    """A histogram of one process. `bounds`: the upper bounds of its classic buckets."""

    def __init__(
        self,
        memory: HistogramMemory,
        name: str,
        help_text: str,
        label_names: tuple[str, ...],
        bounds: Sequence[float],
    ) -> None:
        self.name, self.help, self.label_names = name, help_text, label_names
        self.bounds = tuple(bounds)
        self._memory = memory

    def labels(self, *values: str) -> HistogramChild:
        place = self._memory.place(self._key(values), len(self.bounds))
        if place is None:
            others = OTHERS * len(self.label_names)
            place = self._memory.place(self._key(others), len(self.bounds))
        assert place is not None, "the memory of histograms has room for one of each"
        return HistogramChild(self._memory, place, self.bounds)

    def _key(self, values: tuple[str, ...]) -> bytes:
        return msgspec.json.encode((self.name, values))

    def family(
        self, records: Iterable[HistogramRecord], *, with_natives: bool = True
    ) -> HistogramFamily:
        """Add up what processes observed. `records`: those under its name."""
        found: dict[tuple[str, ...], HistogramSeries] = {}
        for record in records:
            one = self._read(record, with_natives=with_natives)
            if one is not None:
                known = found.setdefault(one.labels, one)
                if known is not one:
                    known.join(one)
        series = [found[labels] for labels in sorted(found)]
        return HistogramFamily(self.name, self.help, self.label_names, self.bounds, series)

    def _read(self, record: HistogramRecord, *, with_natives: bool) -> HistogramSeries | None:
        """Return what one process observed; None: one of another version laid it out."""
        num_counts = len(self.bounds) + 1
        if (record.num_counts, record.num_natives) != (num_counts, NUM_NATIVE):
            return None
        content, at = record.content, record.start
        total, *counts = struct.unpack_from(f"<d{num_counts}Q", content, at)
        at += 8 * (1 + num_counts)
        natives = struct.unpack_from(f"<{NUM_NATIVE}Q", content, at) if with_natives else ()
        at += 8 * NUM_NATIVE
        exemplars = EXEMPLAR.iter_unpack(content[at : at + EXEMPLAR.size * num_counts])
        return HistogramSeries(
            record.labels, total, counts, [*natives], [to_exemplar(*each) for each in exemplars]
        )


def to_exemplar(value: float, at: float, trace: bytes, checksum: int) -> Exemplar | None:
    """Return an exemplar, unless there is none or it was just being written."""
    if not at or zlib.crc32(struct.pack("<dd16s", value, at, trace)) != checksum:
        return None
    return Exemplar(value, at, trace.hex())


def walk(content: bytes | mmap.mmap, used: int) -> Iterator[tuple[bytes, int, int, int]]:
    """Yield the key of each record, where its numbers begin, and how many buckets of each kind it
    has."""
    start = USED.size
    while start + HEAD.size <= used:
        size, key_size, num_counts, num_natives = HEAD.unpack_from(content, start)
        key_at = start + HEAD.size
        if size < HEAD.size + key_size or start + size > used:
            return
        yield (
            bytes(content[key_at : key_at + key_size]),
            aligned(key_at + key_size),
            num_counts,
            num_natives,
        )
        start += size


class HistogramRecord(NamedTuple):
    """One label set of one process, where it stands."""

    labels: tuple[str, ...]
    content: bytes
    start: int
    num_counts: int
    num_natives: int


def records_of(contents: Iterable[bytes]) -> dict[str, list[HistogramRecord]]:
    """Return all records by the names of their histograms. `contents`: of the files."""
    found: dict[str, list[HistogramRecord]] = {}
    for content in contents:
        for key, start, num_counts, num_natives in walk(content, len(content)):
            name, labels = _key_of(key)
            record = HistogramRecord(labels, content, start, num_counts, num_natives)
            found.setdefault(name, []).append(record)
    return found


@lru_cache(MAX_KEYS)
def _key_of(key: bytes) -> tuple[str, tuple[str, ...]]:
    return _key.decode(key)


class HistogramChild:
    """Observes into one label set."""

    __slots__ = ("_at", "_bounds", "_counts", "_floats", "_memory", "_native_at")

    def __init__(self, memory: HistogramMemory, at: int, bounds: tuple[float, ...]) -> None:
        self._memory, self._at, self._bounds = memory, at, bounds
        self._floats, self._counts = memory.floats, memory.counts
        self._native_at = at + len(bounds) + 2

    def observe(self, value: float, times: int = 1) -> None:
        counts = self._counts
        self._floats[self._at] += value * times
        counts[self._at + 1 + bisect_left(self._bounds, value)] += times
        index = 0
        if value > ZERO_THRESHOLD:
            index = ceil(log2(value) * BUCKETS_PER_DOUBLING) - FIRST_INDEX + 1
            if index >= NUM_NATIVE:
                index = NUM_NATIVE - 1
        counts[self._native_at + index] += times

    def exemplify(self, value: float, *, trace: str, at: float) -> None:
        """Name the trace in which a value was observed. From any thread."""
        bucket = bisect_left(self._bounds, value)
        place = 8 * (self._native_at + NUM_NATIVE) + EXEMPLAR.size * bucket
        self._memory.write_exemplar(place, Exemplar(value, at, trace))


def contents_of(folder: Path) -> Iterator[bytes]:
    """Yield what each process observed, also those that are gone."""
    for path in sorted(folder.glob(f"{PREFIX}*{SUFFIX}")):
        with path.open("rb") as file:
            used = USED.unpack(file.read(USED.size))[0]
            file.seek(0)
            yield file.read(used)
