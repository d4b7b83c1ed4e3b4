"""Describes what blocks come from that the pool lacks, and what they are kept in.

A source is asked by the step thread, which never waits for it: `has` is a look-up, and `read`
begins what other threads, or a device, end. What is late is given up by who asked. A tier is a
source that is also written to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.protocol import KVSource
from engine.sequence import Key
from engine.tiers.buffers import Buffer
from engine.tiers.policy import ReadCosts


class Arrival(NamedTuple):
    """Blocks that were brought and checked, in order."""

    rows: NDArray[np.uint8]
    """[blocks, payload_bytes]"""
    give_back: Callable[[], None]
    """To be called when the rows were copied, or when their copy is queued on the device."""


class BlockRead(Protocol):
    """Blocks of one prompt on their way."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""

    @property
    def is_ready(self) -> bool:
        """Whether `take` has something to return."""

    def take(self) -> Arrival | None:
        """Return what comes next, if it has arrived."""

    def cancel(self) -> None:
        """Drop what has not been taken."""


class BlockSource(Protocol):
    """A place that blocks are brought from."""

    @property
    def name(self) -> str:
        """Return what its tokens are counted under."""

    @property
    def record_bytes(self) -> int:
        """Return what is moved to bring a block."""

    @property
    def costs(self) -> ReadCosts:
        """Return what reads take, as far as is known by now."""

    def has(self, digest: bytes) -> bool:
        """Whether a block can be read."""

    def read(self, digests: Sequence[bytes]) -> BlockRead:
        """Begin to read blocks that it has, up to the first that it lost meanwhile."""


class NamedSource(BlockSource, Protocol):
    """A source that has what it is told to have."""

    def expect(self, key: Key, source: KVSource, digests: Sequence[bytes]) -> None:
        """Take a gateway's word that an engine has blocks: those with these digests, of the front
        of the prompt of the sequence `key`."""

    def forget(self, key: Key) -> None:
        """Expect nothing more for this sequence; it may be unknown."""


class Tier(BlockSource, Protocol):
    """A place that this engine keeps blocks in."""

    @property
    def is_on(self) -> bool:
        """Whether it keeps anything; for good, once it does not."""

    @property
    def place(self) -> str:
        """Return what the log calls it: the option that asked for it, and where it is."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def max_blocks(self) -> int: ...

    def takes(self, digest: bytes) -> bool:
        """Whether a block may be put: it is neither here nor on its way."""

    def write_buffer(self) -> Buffer | None:
        """Return a buffer whose `payloads` are to be filled; None: there is none now."""

    def payloads(self, buffer: Buffer, num_blocks: int) -> NDArray[np.uint8]:
        """Return the part of a buffer that blocks go to, [num_blocks, payload_bytes]."""

    def give_back(self, buffer: Buffer) -> None:
        """Take back a buffer of which nothing is to be written."""

    def put(self, buffer: Buffer, digests: Sequence[bytes], wait: Callable[[], None]) -> None:
        """Keep the first rows of a buffer, which is the tier's again. wait: returns when the rows
        are filled."""

    def close(self) -> None:
        """Keep what was put, and end what it runs."""


class Signal:
    """Wakes the step thread, when it has nothing to compute, for what threads of sources did."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._has_news = False

    def notify(self) -> None:
        with self._changed:
            self._has_news = True
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Until something happened since the last call returned, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_news, timeout_s)
            self._has_news = False
