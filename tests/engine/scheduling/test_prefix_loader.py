"""The scheduler over a tier that is slow, loses and damages: whatever it brings, nobody attends to
another text, and nothing is leaked (`scheduler_world.py`)."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.prefix_digests import block_digests, root_digest
from engine.protocol import Breakpoint
from engine.scheduling.prefix_loader import PrefixLoader
from engine.scheduling.tier_writer import COPIES_PER_STEP, STUCK_S
from engine.tiers.host import HostTier
from engine.tiers.policy import PrefillCosts, ReadCosts
from engine.tiers.rests import MAX_REST_S
from engine.tiers.sources import Arrival
from tests.budget import examples
from tests.engine.scheduling.scheduler_world import PROMPTS, World, make_world, sampler
from tests.engine.scheduling.scheduling import request

BLOCK_SIZE = 4
Rows = NDArray[Any]


class Buffer:
    def __init__(self, num_rows: int) -> None:
        self.rows = np.empty((num_rows, BLOCK_SIZE), dtype=object)


class TierRead:
    """Brings a block now and then, and may stop anywhere."""

    def __init__(self, rng: random.Random, found: list[Rows], is_stuck: bool) -> None:
        self._rng, self._found = rng, deque(found)
        self._is_stuck = is_stuck

    @property
    def is_over(self) -> bool:
        return not self._found

    @property
    def is_ready(self) -> bool:
        return False

    def take(self) -> Arrival | None:
        if not self._found or self._is_stuck or self._rng.random() < 0.3:
            return None
        num = self._rng.randint(1, min(3, len(self._found)))
        rows = np.stack([self._found.popleft() for _ in range(num)])
        if self._rng.random() < 0.1:
            self._found.clear()  # the next one is damaged
        return Arrival(rows, lambda: None)

    def cancel(self) -> None:
        self._found.clear()


class MemoryTier:
    """Keeps the texts of blocks by their digests."""

    name = "disk"
    is_on = True
    record_bytes = 1
    costs = ReadCosts(0.0, 1e9)

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.kept: dict[bytes, Rows] = {}
        self.num_read = 0

    def has(self, digest: bytes) -> bool:
        return digest in self.kept

    def takes(self, digest: bytes) -> bool:
        return digest not in self.kept

    def write_buffer(self) -> Buffer | None:
        return Buffer(2) if self.rng.random() < 0.7 else None

    def payloads(self, buffer: Buffer, num_blocks: int) -> Rows:
        return buffer.rows[:num_blocks]

    def give_back(self, buffer: Buffer) -> None:
        pass

    def put(self, buffer: Buffer, digests: Sequence[bytes], wait: Callable[[], None]) -> None:
        wait()
        for digest, row in zip(digests, buffer.rows, strict=False):
            if self.rng.random() < 0.9:
                self.kept[digest] = row.copy()
        while len(self.kept) > 30:
            del self.kept[self.rng.choice(list(self.kept))]

    def read(self, digests: Sequence[bytes]) -> TierRead:
        found = [self.kept[digest] for digest in digests]
        self.num_read += len(found)
        return TierRead(self.rng, found, self.rng.random() < 0.2)

    def close(self) -> None:
        pass


class TextCopier:
    """Copies between a world's memory and rows."""

    def __init__(self, world: World) -> None:
        self.memory = world.memory

    def gather(self, blocks: Sequence[int], rows: Rows) -> Callable[[], None]:
        for row, block in zip(rows, blocks, strict=True):
            row[:] = [self.memory[block, offset] for offset in range(BLOCK_SIZE)]
        return lambda: None

    def scatter(self, blocks: Sequence[int], rows: Rows) -> None:
        for row, block in zip(rows, blocks, strict=True):
            for offset in range(BLOCK_SIZE):
                self.memory[block, offset] = row[offset]


def make_host(num_blocks: int) -> HostTier:
    """Return a host tier over rows of texts."""
    rows: Any = np.empty((num_blocks, BLOCK_SIZE), dtype=object)
    return HostTier(rows, ReadCosts(0.0, 2e9))


def make_tiered(
    rng: random.Random, tier: MemoryTier | None, host: HostTier | None = None, **changes: Any
) -> World:
    options: dict[str, Any] = {
        "spare_blocks": rng.randint(0, 6),
        "window": None,
        "enabled": True,
        "max_tokens": rng.randint(1, 24),
        "max_seqs": rng.randint(1, 6),
        "ahead": rng.random() < 0.5,
        "limits": rng.choice([None, {}]),
    }
    world = make_world(**(options | changes))
    scheduler: Any = world.scheduler
    fake: Any = tier
    loader = PrefixLoader(
        scheduler.cache,
        TextCopier(world),
        lambda: PrefillCosts(token_s=rng.choice([0.3, 3.0])),
        host=host,
        disk=fake,
        window=rng.randint(1, 12),
        clock=world.clock,
    )
    scheduler._loader = scheduler._planner._loader = loader
    return world


def act(world: World, rng: random.Random, number: int) -> None:
    draw = sampler(rng)
    kind = rng.random()
    if kind < 0.4 and world.scheduler.num_queued < 3:
        prompt = rng.choice(PROMPTS)[: rng.randint(1, 20)] + [40] * rng.randint(0, 3)
        salt, n = rng.choice(["", "", "org-2"]), rng.choice([1, 1, 1, 2])
        turn = {"tenant": rng.choice(["a", "b"])} if world.lanes else None
        tokens = rng.randint(1, 12)
        asked = request(f"r{number}", prompt, salt=salt, n=n, max_tokens=tokens, turn=turn)
        world.add(asked)
    elif kind < 0.45 and world.open:
        world.abort(rng.choice(sorted(world.open)))
    elif kind < 0.5 and world.open and world.lanes:
        request_id = rng.choice(sorted(world.open))
        (world.resume if request_id in world.paused else world.pause)(request_id)
    elif kind < 0.53 and not world.launched:
        world.fail(tries_alone=rng.random() < 0.5)
    else:
        world.step(draw)
    world.check()


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32))
def test_whatever_tiers_bring_nobody_reads_another_text(seed: int) -> None:
    rng = random.Random(seed)
    tier = rng.choice([MemoryTier(rng), MemoryTier(rng), None])
    for _ in range(2):  # the second pool finds what the first one wrote
        host = None if tier is not None and rng.random() < 0.4 else make_host(rng.randint(4, 40))
        world = make_tiered(rng, tier, host)
        for number in range(60):
            act(world, rng, number)
        world.drain(sampler(rng))
        loader = world.scheduler._loader
        assert loader is not None
        kept = (loader._loads, loader._leaders, loader._following, loader._tried, loader._loaded)
        assert not any((*kept, loader._worth, loader._num_queued)), "kept of who is gone"
        if host is not None:
            host.check_integrity()
            assert not any(chunk.num_readers for chunk in host._chunks.values()), "pinned for ever"


def test_what_two_want_is_read_once() -> None:
    rng = random.Random(1)
    tier = MemoryTier(rng)
    changes = {"spare_blocks": 6, "max_seqs": 4, "max_tokens": 24, "ahead": False, "limits": None}
    world = make_tiered(rng, tier, **changes)
    prompt = PROMPTS[0]
    for number in range(40):
        world.add(request(f"r{number}", prompt, max_tokens=1))
        world.drain(lambda: 1)
    assert len(tier.kept) == 5
    after = make_tiered(rng, tier, **changes)
    rng.random = lambda: 0.99  # type: ignore[method-assign]  # nothing is lost or late
    after.add(request("first", prompt, max_tokens=1))
    after.add(request("second", prompt, max_tokens=1))
    after.drain(lambda: 1)
    assert tier.num_read == 4, "one block short of the prompt's end"
    loader = after.scheduler._loader
    assert loader is not None and loader.hit_tokens == {"disk": 16}, "the second found it cached"


def test_what_a_lease_keeps_is_written_though_it_is_asked_for_once() -> None:
    rng = random.Random(1)
    tier = MemoryTier(rng)
    changes = {"spare_blocks": 6, "max_seqs": 4, "max_tokens": 24, "ahead": False, "limits": None}
    world = make_tiered(rng, tier, **changes)
    leases, loader = world.scheduler.cache.leases, world.scheduler._loader
    assert loader is not None
    marks = tuple(Breakpoint(num_tokens=number, ttl_s=300.0) for number in (8, 16))
    for number, room in enumerate((0, 2)):
        leases.max_blocks_per_tenant = room
        world.add(request(f"r{number}", PROMPTS[2 * number], turn={"breakpoints": marks}))
        world.drain(lambda: 1)
        while loader.has_writes:
            loader.write()
    assert leases.num_blocks == 2, "there was no room for the second breakpoint, nor for another"
    assert [*tier.kept] == block_digests(root_digest(""), PROMPTS[2][:8], BLOCK_SIZE)


@pytest.mark.parametrize("room", [0, 1, 3])
def test_takes_no_more_blocks_than_are_spare(room: int) -> None:
    rng = random.Random(1)
    tier = MemoryTier(rng)
    world = make_tiered(rng, tier, spare_blocks=0, limits=None)
    seq_cache = world.scheduler.cache
    assert seq_cache.num_available == seq_cache.pool.num_blocks
    world.add(request("first", PROMPTS[0], max_tokens=1))
    loader = world.scheduler._loader
    assert loader is not None
    seq = next(iter(world.scheduler._waiting))
    tier.kept = {
        seq_cache.digest(seq, index): np.full(BLOCK_SIZE, None, dtype=object) for index in range(4)
    }
    rng.random = lambda: 0.99  # type: ignore[method-assign]
    assert loader.begin(seq, [], room) == (room > 0)
    while loader._loads:
        loader.advance(room)
    assert seq_cache.num_cached_blocks == room
    seq_cache.check_integrity([])


def test_a_tier_that_takes_nothing_is_not_waited_for_for_ever() -> None:
    rng = random.Random(1)
    tier = MemoryTier(rng)
    world = make_tiered(rng, tier, spare_blocks=6, max_tokens=24, ahead=False, limits=None)
    tier.write_buffer = lambda: None  # type: ignore[method-assign]
    for number in range(2):
        world.add(request(f"r{number}", PROMPTS[0], max_tokens=1))
        world.drain(lambda: 1)
    loader = world.scheduler._loader
    assert loader is not None and loader.has_writes and world.scheduler.has_work()
    world.clock.now += STUCK_S
    world.step(lambda: 1)
    assert not loader.has_writes and not world.scheduler.has_work()


def ask(world: World, number: int, prompt: list[int]) -> None:
    """Ask for a prompt, and evict it."""
    world.add(request(f"r{number}", prompt, max_tokens=1))
    while world.open or world.scheduler.has_work():
        world.clock.now += 0.25
        world.step(lambda: 1)
    cache = world.scheduler.cache
    while cache._idle:
        cache._evict()


def test_a_late_source_is_asked_by_longer_prompts_and_by_all_once_it_is_well() -> None:
    rng = random.Random(1)
    tier = MemoryTier(rng)
    changes = {"spare_blocks": 0, "max_seqs": 1, "max_tokens": 24, "ahead": False, "limits": None}
    world = make_tiered(rng, tier, **changes)
    rng.random = lambda: 0.5  # type: ignore[method-assign]
    loader, numbers = world.scheduler._loader, iter(range(1000))
    assert loader is not None
    loader._costs = lambda: PrefillCosts(token_s=3.0)
    short, long = PROMPTS[0][:6], PROMPTS[2]
    num_short, num_long = 1, (len(long) - 1) // BLOCK_SIZE
    assert num_long >= 4 and short != long[:6]

    def num_asked(prompt: list[int]) -> int:
        before = tier.num_read
        ask(world, next(numbers), prompt)
        return tier.num_read - before

    for prompt in (short, long) * 2:
        num_asked(prompt)
    assert (num_asked(short), num_asked(long)) == (num_short, num_long) and not loader.num_late
    read = tier.read

    def never(digests: Sequence[bytes]) -> TierRead:
        reading = read(digests)
        reading._is_stuck = True
        return reading

    tier.read = never  # type: ignore[method-assign]
    asked, began_s = [], world.clock.now
    for _ in range(60):
        asked.append(num_asked(short))
        world.clock.now += 1.0
    most = 5 + (world.clock.now - began_s) / MAX_REST_S
    assert asked[:2] == [num_short] * 2, "the first time may have been a stall"
    assert 5 <= loader.num_late <= most and asked.count(num_short) == loader.num_late
    while not num_asked(short):
        pass
    assert num_asked(long) == num_long, "it can wait for longer"
    tier.read = read  # type: ignore[method-assign]
    assert num_asked(short) == 0 and num_asked(long) == num_long
    world.clock.now += MAX_REST_S
    assert num_asked(short) == num_short
    assert num_asked(short) == num_short, "it is asked as before once it was in time"


def test_what_has_arrived_is_not_given_up_because_a_step_was_long() -> None:
    rng = random.Random(1)
    tier = MemoryTier(rng)
    world = make_tiered(rng, tier, spare_blocks=6, max_tokens=24, ahead=False, limits=None)
    loader = world.scheduler._loader
    assert loader is not None
    prompt = [3] * ((COPIES_PER_STEP + 1) * BLOCK_SIZE + 1)
    world.add(request("first", prompt, max_tokens=1))
    seq = next(iter(world.scheduler._waiting))
    row, num_kept = np.full(BLOCK_SIZE, None, dtype=object), COPIES_PER_STEP + 1
    tier.kept = {world.scheduler.cache.digest(seq, index): row for index in range(num_kept)}

    class Ready(TierRead):
        @property
        def is_ready(self) -> bool:
            return bool(self._found)

        def take(self) -> Arrival | None:
            return Arrival(self._found.popleft()[None], lambda: None) if self._found else None

    tier.read = lambda digests: Ready(rng, [row] * len(digests), False)  # type: ignore[method-assign]
    assert loader.begin(seq, [], num_kept)
    world.clock.now += 1000.0
    assert loader.advance(num_kept) == [], "a part of it is copied between two steps"
    world.clock.now += 1000.0
    assert loader.advance(num_kept) == [seq]
    assert loader.num_late == 0 and loader._loaded[seq.key][-1][2] == num_kept
