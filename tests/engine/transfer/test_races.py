"""Reads beside an owner that evicts, rewrites and lets holds expire: nothing wrong is ever read."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.transfer.connection import PeerConnection
from tests.budget import cycles
from tests.engine.transfer.owner import BLOCK_BYTES, Owner, connect, content_of

NUM_READS = cycles(10_000, 300)
NUM_PROMPTS = 12
HOLD_S = (0.0, 1.0, 20.0)


@pytest.fixture
def often_switched() -> Iterator[None]:
    """Let threads take turns amid a copy, not only between two."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class InterruptedParts(list[NDArray[np.uint8]]):
    """The parts of a pool, between which another thread has its turn now and then."""

    def __iter__(self) -> Iterator[NDArray[np.uint8]]:
        for part in super().__iter__():
            if random.random() < 0.05:
                time.sleep(0)
            yield part


class Reader(threading.Thread):
    """Reads parts of prompts at random, and keeps count of what came."""

    def __init__(self, peer: PeerConnection, prompts: list[list[bytes]], seed: int) -> None:
        super().__init__(daemon=True)
        self.num_read = self.num_good = 0
        self.error: BaseException | None = None
        self._peer, self._prompts, self._random = peer, prompts, random.Random(seed)

    def run(self) -> None:
        try:
            while self.num_read < NUM_READS // 2:
                self._read()
        except BaseException as error:
            self.error = error

    def _read(self) -> None:
        draw, peer = self._random, self._peer
        digests = draw.choice(self._prompts)
        first = draw.randrange(len(digests))
        held = peer.hold(digests, first, draw.choice(HOLD_S))
        if draw.random() < 0.5:
            time.sleep(0)
        if held is None:
            return
        self.num_read += 1
        wanted = digests[first : first + len(held.blocks)]
        at = draw.randrange(len(wanted))
        rows = np.zeros((len(wanted) - at, BLOCK_BYTES), np.uint8)
        num_good = peer.read(held, at, rows)
        for row, digest in zip(rows[:num_good], wanted[at:], strict=False):
            assert np.array_equal(row, content_of(digest)), "the content of another block"
        self.num_good += num_good
        if draw.random() < 0.7:
            peer.release(held)


@pytest.mark.usefixtures("often_switched")
@pytest.mark.parametrize("via", ["memory", "socket"])
def test_no_race_brings_the_content_of_another_block(tmp_path: Path, via: str) -> None:
    owner, draw = Owner(tmp_path), random.Random(1)
    prompts = [
        [number, *(draw.randrange(50) for _ in range(draw.randrange(16, 40)))]
        for number in range(NUM_PROMPTS)
    ]
    digests = [owner.compute(each) for each in prompts]
    address = owner.serve(offers_memory=via == "memory").address
    readers = [Reader(connect(address), digests, seed) for seed in (2, 3)]
    for pool in (owner.pool, *(reader._peer._pool for reader in readers)):
        if pool is not None:
            pool._parts = InterruptedParts(pool._parts)
    for reader in readers:
        reader.start()
    while any(reader.is_alive() for reader in readers):
        for _ in range(50):
            owner.compute(draw.choice(prompts))
            if draw.random() < 0.2:
                owner.now_s += draw.random()
                owner.holds.advance()
        assert owner.holds.num_blocks <= 8
        owner.cache.check_integrity((), owner.holds.tables())
    for reader in readers:
        if reader.error is not None:
            raise reader.error
        reader._peer.close()
    assert sum(each.num_good for each in readers) > 0
    owner.now_s += 100.0
    owner.holds.advance()
    assert owner.cache.num_available == owner.pool.shape.num_blocks
    owner.close()
