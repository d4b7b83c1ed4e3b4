"""A source of blocks of other engines: what comes, what does not, and what is learnt of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.protocol import KVSource
from engine.tiers.sources import Signal
from engine.transfer.peers import AWAY_S, FIRST_COSTS, PeerRead, PeerSource
from tests.engine.transfer.owner import BLOCK_BYTES, LAYOUT, Owner, content_of

PROMPT = list(range(41))
KEY = ("r", 0)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    owner = Owner(tmp_path)
    yield owner
    owner.close()


class World:
    """A source, and the time that it goes by."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.signal = Signal()
        self.source = PeerSource(
            engine_id="reader",
            layout=LAYOUT,
            block_bytes=BLOCK_BYTES,
            token="",
            signal=self.signal,
            clock=lambda: self.now_s,
        )

    def whole(self, reading: PeerRead) -> list[NDArray[np.uint8]]:
        """Wait for the end of a read; the blocks that came."""
        rows: list[NDArray[np.uint8]] = []
        while not reading.is_over:
            if (arrival := reading.take()) is None:
                self.signal.wait(1.0)
            else:
                rows += [row.copy() for row in arrival.rows]
                arrival.give_back()
        return rows


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.source.close()


def source_at(address: str, engine_id: str = "owner") -> KVSource:
    return KVSource(engine_id=engine_id, address=address, num_tokens=len(PROMPT))


@pytest.mark.parametrize("offers_memory", [True, False])
def test_what_was_expected_comes_in_order(
    owner: Owner, world: World, offers_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.transfer.peers.READ_BYTES", 3 * BLOCK_BYTES)
    world = World()
    digests = owner.compute(PROMPT)
    server = owner.serve(offers_memory=offers_memory)
    world.source.expect(KEY, source_at(server.address), digests)
    assert all(map(world.source.has, digests)) and not world.source.has(b"x" * 32)
    rows = world.whole(world.source.read(digests[2:]))
    assert len(rows) == 8
    assert all(map(np.array_equal, rows, map(content_of, digests[2:])))
    via = "memory" if offers_memory else "socket"
    assert world.source.num_bytes[via] == 8 * BLOCK_BYTES
    assert world.source.num_stale == world.source.num_failed == 0
    world.source.expect(("other", 0), source_at(server.address), [b"x" * 32])
    assert world.whole(world.source.read([b"x" * 32])) == []  # so all before it was heard
    owner.holds.advance()
    assert owner.holds.num_blocks == 0, "it was released"
    world.source.close()


def test_what_is_not_there_any_more_does_not_come(owner: Owner, world: World) -> None:
    digests = owner.compute(PROMPT)
    world.source.expect(KEY, source_at(owner.serve().address), digests)
    for number in (100, 300):
        owner.compute(range(number, number + 64))
    assert len(world.whole(world.source.read(digests))) < 10


def test_nothing_is_expected_of_itself_or_for_who_is_gone(owner: Owner, world: World) -> None:
    digests, address = owner.compute(PROMPT), owner.serve().address
    world.source.expect(KEY, source_at(address, "reader"), digests)
    assert not world.source.has(digests[0])
    world.source.expect(KEY, source_at(address), digests)
    world.source.expect(("other", 0), source_at(address), digests[:5])
    world.source.forget(KEY)
    assert world.source.has(digests[4]) and not world.source.has(digests[5])
    world.source.forget(("other", 0))
    world.source.forget(("unknown", 0))
    assert not world.source.has(digests[0]) and not world.source._hints


def test_what_begins_alike_is_read_no_further_than_that(owner: Owner, world: World) -> None:
    """A later prompt shares the first blocks, and its word on them is the newer one."""
    mine, theirs = owner.compute(PROMPT), owner.compute([*PROMPT[:12], *range(70, 98)])
    address = owner.serve().address
    world.source.expect(KEY, source_at(address), mine)
    world.source.expect(("other", 0), source_at(address), theirs)
    assert mine[:3] == theirs[:3] and mine[3] != theirs[3]
    rows = world.whole(world.source.read(mine))
    assert len(rows) == 3
    assert all(map(np.array_equal, rows, map(content_of, mine)))
    assert len(world.whole(world.source.read(mine[3:]))) == 7


def test_another_engine_at_the_address_brings_nothing(owner: Owner, world: World) -> None:
    digests = owner.compute(PROMPT)
    world.source.expect(KEY, source_at(owner.serve().address, "another"), digests)
    assert world.whole(world.source.read(digests)) == [] and world.source.num_failed == 0


def test_who_cannot_be_read_is_left_alone_for_a_while(owner: Owner, world: World) -> None:
    digests = owner.compute(PROMPT)
    server = owner.serve(token="another")
    world.source.expect(KEY, source_at(server.address), digests)
    assert world.whole(world.source.read(digests)) == []
    assert world.source.num_failed == 1 and not world.source.has(digests[0])
    world.now_s = AWAY_S
    assert world.source.has(digests[0])
    server.close()
    assert world.whole(world.source.read(digests)) == [] and world.source.num_failed == 2


def test_no_token_is_shown_to_another_machine(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    digests = [b"d" * 32]
    world.source.expect(KEY, source_at("tcp:192.0.2.1:9000"), digests)
    assert world.whole(world.source.read(digests)) == []
    assert world.source.num_failed == 1 and "it is on another machine" in caplog.text


def test_a_read_that_is_cancelled_gives_its_buffers_back(owner: Owner, world: World) -> None:
    digests = owner.compute(PROMPT)
    world.source.expect(KEY, source_at(owner.serve().address), digests)
    for _ in range(100):
        reading = world.source.read(digests)
        reading.cancel()
        assert reading.is_over and reading.take() is None
    assert len(world.whole(world.source.read(digests))) == 10


def test_costs_are_learnt(owner: Owner, world: World) -> None:
    digests = owner.compute(PROMPT)
    world.source.expect(KEY, source_at(owner.serve().address), digests)
    assert world.source.costs == FIRST_COSTS
    world.whole(world.source.read(digests))
    assert world.source.costs.latency_s != FIRST_COSTS.latency_s
