"""Puts a KV pool where other processes of this host can map it, and reads such a pool.

    file of memory (memfd_create(2)): generation of each block | part | part | ...

A part has the keys or the values of one layer, of all blocks side by side. The file is sealed: it
keeps its size, so that who maps it never reads behind its end, and nobody but its owner writes.

A reader takes no lock. It compares generations before and after a copy (a seqlock, one for each
block). The owner raises one before it lets anybody write to the block, and what writes is another
thread's step, begun later: on any processor the new bytes are seen after the new generation.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile
from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from engine.errors import ProtocolError
from engine.kv_cache.block_holds import Generations
from engine.tiers.buffers import to_pages

GENERATION_BYTES = 8
F_SEAL_FUTURE_WRITE = 0x0010
"""linux/fcntl.h, since 5.1: no new mapping can be written to. Python has no name for it."""

LONG_RUN = 4
"""Blocks side by side from which on a run is read part by part. With 60 parts of 6 KiB, eight at
once come at 15.1 GB/s of processor time instead of 12.9, and one at 7.9 instead of 12.4, where a
plain copy of the same memory has 19.7."""


class BlockReader(Protocol):
    """Copies blocks out of a pool that is written to meanwhile. Safe in any thread."""

    def read(
        self, blocks: Sequence[int], generations: Sequence[int], rows: NDArray[np.uint8]
    ) -> int:
        """Fill `rows` [blocks, block_bytes]. Return how many of the first ones had the generation
        that is given, before and after."""


class PoolShape:
    """The places of all in the file."""

    def __init__(self, num_blocks: int, part_bytes: Sequence[int]) -> None:
        """part_bytes: of a block, for each part."""
        self.num_blocks = num_blocks
        self.part_bytes = tuple(part_bytes)
        self.offsets: list[int] = []
        end = to_pages(num_blocks * GENERATION_BYTES)
        for num_bytes in part_bytes:
            self.offsets.append(end)
            end = to_pages(end + num_blocks * num_bytes)
        self.num_bytes = end

    @property
    def block_bytes(self) -> int:
        return sum(self.part_bytes)


class MappedPool:
    """A pool in a mapped file."""

    def __init__(self, mapped: mmap.mmap, shape: PoolShape) -> None:
        """mapped: closed by the collector, once nothing shows it any more."""
        self.shape = shape
        size = shape.num_blocks * GENERATION_BYTES
        self.generations: memoryview[int] = memoryview(mapped)[:size].cast("Q")
        self._parts = [*_stacks_of(np.frombuffer(mapped, np.uint8), shape)]
        """[parts, blocks, bytes]: parts of one size side by side are copied together."""

    def read(
        self, blocks: Sequence[int], generations: Sequence[int], rows: NDArray[np.uint8]
    ) -> int:
        before = num_same(self.generations, blocks, generations)
        blocks, generations = blocks[:before], generations[:before]
        runs = [*runs_of(blocks)]
        start = 0
        for parts in self._parts:
            num_parts, _, num_bytes = parts.shape
            end = start + num_parts * num_bytes
            for first, block, count in runs:
                into = rows[first : first + count, start:end]
                into = into.reshape(count, num_parts, num_bytes, copy=False).swapaxes(0, 1)
                _copy(parts[:, block : block + count], into)
            start = end
        return num_same(self.generations, blocks, generations)


def _copy(parts: NDArray[np.uint8], into: NDArray[np.uint8]) -> None:
    """Copy [parts, blocks, bytes], in one call: between two the interpreter's lock may have to be
    waited for."""
    if parts.shape[1] < LONG_RUN:
        into[:] = parts
    else:
        # An assignment goes by where it writes, block by block, and reads a few KiB from each of
        # many pages that are far from each other. This goes by where the parts lie.
        np.positive(parts, out=into, order="C")


def _stacks_of(memory: NDArray[np.uint8], shape: PoolShape) -> Iterator[NDArray[np.uint8]]:
    """Yield the parts of a pool, those of one size that follow each other as one array."""
    first = 0
    for num_bytes, same in groupby(shape.part_bytes):
        num_parts = len([*same])
        offsets = shape.offsets[first : first + num_parts]
        step = offsets[1] - offsets[0] if num_parts > 1 else 0
        yield as_strided(
            memory[offsets[0] :],
            (num_parts, shape.num_blocks, num_bytes),
            (step, num_bytes, 1),
            writeable=False,
        )
        first += num_parts


class SharedPool(MappedPool):
    """A pool of this process in a file of memory, which `fd` gives to others."""

    def __init__(self, num_blocks: int, part_bytes: Sequence[int]) -> None:
        """Raises OSError."""
        shape = PoolShape(num_blocks, part_bytes)
        self.fd = os.memfd_create("kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, shape.num_bytes)
            self._mapped = mmap.mmap(self.fd, shape.num_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
            with contextlib.suppress(OSError):  # an older kernel: readers map it read-only anyway
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
        except OSError:
            os.close(self.fd)
            raise
        super().__init__(self._mapped, shape)

    def part(self, number: int) -> memoryview:
        """Return the memory of a part, to be written to."""
        start = self.shape.offsets[number]
        size = self.shape.num_blocks * self.shape.part_bytes[number]
        return memoryview(self._mapped)[start : start + size]

    def close(self) -> None:
        """Give it to nobody else; whoever has it keeps it."""
        os.close(self.fd)


def map_pool(fd: int, shape: PoolShape) -> MappedPool:
    """Map the pool of another process. Raises OSError, and ProtocolError for a file that is not as
    large as it has to be, or may become smaller."""
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ProtocolError("the pool of another engine may shrink")
    if os.fstat(fd).st_size != shape.num_bytes:
        raise ProtocolError("the pool of another engine has another size")
    return MappedPool(mmap.mmap(fd, shape.num_bytes, prot=mmap.PROT_READ), shape)


def runs_of(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of blocks that lie side by side: the position of the first, its number and
    how many they are."""
    first = 0
    for at in range(1, len(blocks) + 1):
        if at == len(blocks) or blocks[at] != blocks[at - 1] + 1:
            yield first, blocks[first], at - first
            first = at


def num_same(current: Generations, blocks: Sequence[int], generations: Sequence[int]) -> int:
    """Return how many of the first blocks have the generation that is given."""
    told = zip(blocks, generations, strict=True)
    return sum(1 for _ in takewhile(lambda each: current[each[0]] == each[1], told))
