"""Brings prefixes that the pool lacks from where they are, and writes to tiers what prompts use
again and what the pool evicts.

A sequence whose prefix goes on elsewhere is not started: it waits beside the queue while that is
read, and steps go on. Sources are asked in the order of what a block of theirs costs, and one may
go on where another ends. In between two steps what arrived is copied into blocks that are held from
the first to the last, and only then registered. When all is there, or the rest is late, damaged or
without room, the sequence is back in its place in the queue, finds what is cached as any other
does, and computes the rest. What others are reading already is waited for, not read again. A source
that was late is left alone for a while, by prompts that would wait no longer.

Knows no request and no policy of its own (`engine.tiers.policy`).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from engine.kv_cache.prefix_cache import PrefixCache
from engine.prefix_digests import SPAN_BLOCKS
from engine.protocol import KVSource
from engine.scheduling.tier_writer import COPIES_PER_STEP, BlockCopier, EvictionWatch, TierWriter
from engine.sequence import Key, Sequence
from engine.tiers.policy import (
    PrefillCosts,
    is_in_time,
    is_worth_reading,
    num_worth_keeping,
    patience_s,
)
from engine.tiers.rests import SourceRests
from engine.tiers.sources import Arrival, BlockRead, BlockSource, NamedSource, Signal, Tier

WAIT_S = 0.005
"""How long a loop with nothing to compute waits for a source before it looks for commands again."""


@dataclass(slots=True, eq=False)
class _Part:
    source: BlockSource
    end: int
    reading: BlockRead


@dataclass(slots=True, eq=False)
class _Load:
    seq: Sequence
    table: list[int]
    """The blocks of its prefix so far, held."""
    start: int
    """Those that were in the pool when it began."""
    parts: deque[_Part]
    """Those that are not there as a whole; none: nothing more comes."""
    end: int
    """The blocks that there will be."""
    started_s: float
    followers: list[Sequence] = field(default_factory=list)
    brought: list[tuple[str, int, int]] = field(default_factory=list)
    """(source, first block, end) of what arrived."""

    @property
    def is_ready(self) -> bool:
        return bool(self.parts) and self.parts[0].reading.is_ready

    def take(self) -> Arrival | None:
        """Return what comes next, if it has arrived."""
        while self.parts:
            part = self.parts[0]
            if (arrival := part.reading.take()) is not None:
                return arrival
            if not part.reading.is_over:
                return None
            if len(self.table) < part.end:
                self.cancel()  # what comes behind a block that is missing is of no use
            else:
                self.parts.popleft()
        return None

    def cancel(self) -> None:
        """Drop what has not been taken."""
        while self.parts:
            self.parts.popleft().reading.cancel()


class PrefixLoader:
    """One per pool."""

    def __init__(
        self,
        cache: PrefixCache,
        copier: BlockCopier,
        costs: Callable[[], PrefillCosts],
        *,
        host: Tier | None = None,
        disk: Tier | None = None,
        peers: NamedSource | None = None,
        window: int = 1,
        signal: Signal | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """costs: what computing a prompt takes, as is known by now. host: keeps what the pool
        evicts. disk: keeps what is used again. peers: other engines. window: the blocks that a few
        steps may evict. signal: what the sources notify. clock: monotonic seconds."""
        self.host, self.disk = host, disk
        self.signal = signal or Signal()
        self.hit_tokens: Counter[str] = Counter()
        """Prompt tokens that requests did not compute, by the source that brought them, since the
        start."""
        self.num_late = 0
        """Loads that were given up because they took too long."""
        self._peers = peers
        self._sources: list[BlockSource] = [
            each for each in (host, disk, peers) if each is not None
        ]
        self._cache = cache
        self._copier = copier
        self._costs = costs
        self._clock = clock
        self._used = None if disk is None else TierWriter(disk, cache, copier, clock=clock)
        self._evicted = None if host is None else TierWriter(host, cache, copier, clock=clock)
        self._watch = EvictionWatch(cache, window)
        self._loads: dict[Key, _Load] = {}
        self._leaders: dict[bytes, _Load] = {}
        """By each digest that is being read."""
        self._following: dict[Key, _Load] = {}
        self._done: dict[Key, Sequence] = {}
        """Those whose load ended since the last `advance`."""
        self._tried: dict[Key, int] = {}
        """How often an open sequence had been preempted when sources were last asked for it."""
        self._loaded: dict[Key, list[tuple[str, int, int]]] = {}
        """(source, first block, end) of what its load brought to a sequence that waits."""
        self._worth: dict[Key, int] = {}
        """Blocks of a prompt that are to be written once they are computed."""
        self._num_queued: dict[Key, int] = {}
        """Those of them that were queued."""
        self._rests = SourceRests()

    @property
    def has_tiers(self) -> bool:
        """Whether anything is kept, and not only read from others."""
        return bool(self._writers)

    @property
    def has_writes(self) -> bool:
        return any(each.has_writes for each in self._writers)

    @property
    def _writers(self) -> list[TierWriter]:
        return [each for each in (self._evicted, self._used) if each is not None]

    def close(self) -> None:
        """Keep what was to be kept, and end what the tiers run."""
        for writer in self._writers:
            writer.tier.close()

    def is_loading(self, seq: Sequence) -> bool:
        """Whether a sequence is beside the queue."""
        return any(seq.key in keys for keys in (self._loads, self._following, self._done))

    def held_tables(self) -> Iterator[list[int]]:
        return (load.table for load in self._loads.values())

    # Reading

    def expect(self, seq: Sequence, source: KVSource) -> None:
        """Note which engine has the beginning of a sequence's prompt, as its gateway says: in whole
        spans, and perhaps a part of the next one."""
        if self._peers is not None and self._cache.serves(seq):
            most = source.num_tokens // self._cache.block_size + SPAN_BLOCKS - 1
            self._peers.expect(seq.key, source, self._cache.prompt_digests(seq)[1 : 1 + most])

    def begin(self, seq: Sequence, table: list[int], num_spare: int) -> bool:
        """Begin to bring what follows the matched `table` of a sequence that would start. False
        where that is nothing, or not worth it. num_spare: blocks that nobody needs."""
        cache, first = self._cache, len(table)
        last = (seq.num_tokens - 1) // cache.block_size
        if first >= last or not cache.serves(seq):
            return False
        if self._tried.get(seq.key) == seq.num_preemptions:
            return False
        digest = cache.digest(seq, first)
        if (leader := self._leaders.get(digest)) is not None:
            leader.followers.append(seq)
            self._following[seq.key] = leader
            return True
        if not any(source.has(digest) for source in self._sources):
            return False
        self._tried[seq.key] = seq.num_preemptions
        last = min(last, first + num_spare - cache.num_idle(table))
        now_s = self._clock()
        plan = self._plan(seq, first, last, now_s)
        if not plan:
            return False
        cache.hold(table)
        parts, start, end = deque[_Part](), first, plan[-1][1]
        for source, stop in plan:
            parts.append(_Part(source, stop, source.read(seq.block_digests[start:stop])))
            start = stop
        load = _Load(seq, list(table), first, parts, end, now_s)
        self._loads[seq.key] = load
        self._leaders.update(dict.fromkeys(seq.block_digests[first:end], load))
        return True

    def _plan(
        self, seq: Sequence, first: int, last: int, now_s: float
    ) -> list[tuple[BlockSource, int]]:
        """Return which source brings blocks of [first, last), up to which one each; nothing where
        that is not worth it."""
        sources = sorted(
            self._sources, key=lambda each: each.costs.seconds(SPAN_BLOCKS * each.record_bytes)
        )
        size, costs = self._cache.block_size, self._costs()
        while plan := self._worthy(seq, first, last, sources):
            end = plan[-1][1]
            wait_s = self._patience_s(first, first, end)
            resting = [
                each for each, _ in plan if self._rests.is_left_alone(each.name, wait_s, now_s)
            ]
            if not resting:
                read = plan[0][0].costs
                is_begun = is_in_time(costs, read, start=first * size, end=end * size)
                return plan if is_begun else []
            sources = [each for each in sources if each not in resting]
        return []

    def _worthy(
        self, seq: Sequence, first: int, last: int, sources: list[BlockSource]
    ) -> list[tuple[BlockSource, int]]:
        """Return which source, of those in their order, would bring blocks of [first, last), up to
        which one each, as far as that is expected to be sooner than to compute them."""
        plan: list[tuple[BlockSource, int]] = []
        for index in range(first, last):
            digest = self._cache.digest(seq, index)
            source = next((each for each in sources if each.has(digest)), None)
            if source is None:
                break
            if plan and plan[-1][0] is source:
                plan[-1] = source, index + 1
            else:
                plan.append((source, index + 1))
        size, costs, start = self._cache.block_size, self._costs(), first
        for number, (source, stop) in enumerate(plan):
            num_bytes = (stop - start) * source.record_bytes
            is_worth = is_worth_reading(
                costs, source.costs, start=start * size, end=stop * size, num_bytes=num_bytes
            )
            if not is_worth:
                return plan[:number]
            start = stop
        return plan

    def advance(self, num_spare: int) -> list[Sequence]:
        """Copy what arrived into the pool. The sequences that wait no longer."""
        num_copies = COPIES_PER_STEP
        for load in list(self._loads.values()):
            while num_copies and (arrival := load.take()) is not None:
                num_copies -= 1
                num_spare -= self._copy(load, arrival, max(0, num_spare))
            if not load.parts:
                self._end(load)
            elif not load.is_ready and self._patience_left_s(load) < 0:  # else it is this thread
                self._give_up(load)  # that is late: the last step was long, or there is much to do
        done, self._done = self._done, {}
        return list(done.values())

    def forget(self, seq: Sequence) -> None:
        """End what is kept for a sequence, which is finished."""
        key = seq.key
        if (load := self._loads.get(key)) is not None:
            self._end(load)
        if (leader := self._following.pop(key, None)) is not None:
            leader.followers.remove(seq)
        self._done.pop(key, None)
        if self._peers is not None:
            self._peers.forget(key)
        for kept in (self._tried, self._loaded, self._worth, self._num_queued):
            kept.pop(key, None)

    def wait(self) -> None:
        """Wait until something was read or written, for a short time."""
        if any(load.is_ready for load in self._loads.values()):
            return
        left_s = min((self._patience_left_s(load) for load in self._loads.values()), default=WAIT_S)
        self.signal.wait(max(0.0, min(WAIT_S, left_s)))

    def _give_up(self, load: _Load) -> None:
        """Compute what is late, and let its source rest."""
        self.num_late += 1
        name, now_s = load.parts[0].source.name, self._clock()
        self._rests.was_late(name, self._wait_s(load), load.started_s, now_s)
        self._end(load)

    def _patience_left_s(self, load: _Load) -> float:
        most_s = self._patience_s(load.start, len(load.table), load.end)
        return load.started_s + most_s - self._clock()

    def _wait_s(self, load: _Load) -> float:
        """Return how long it waits for the first block."""
        return self._patience_s(load.start, load.start, load.end)

    def _patience_s(self, first: int, arrived: int, end: int) -> float:
        """As `engine.tiers.policy`, of blocks."""
        start, middle, stop = (each * self._cache.block_size for each in (first, arrived, end))
        return patience_s(self._costs(), start=start, arrived=middle, end=stop)

    def _copy(self, load: _Load, arrival: Arrival, num_spare: int) -> int:
        """Put what arrived into blocks; the load is over where there is no room for it. How many
        blocks were taken."""
        cache, first = self._cache, len(load.table)
        digests = load.seq.block_digests[first : first + len(arrival.rows)]
        blocks: list[int] = []
        new: list[int] = []
        """The rows whose content the pool lacks, which are nearly always all of them."""
        for row, digest in enumerate(digests[:num_spare]):
            block = cache.find(digest)
            if block is None:
                new.append(row)
                block = cache.allocate()
            else:
                cache.hold([block])
            blocks.append(block)
        for start, stop in _runs(new):
            self._copier.scatter(blocks[start:stop], arrival.rows[start:stop])
        for row in new:  # not before its content is there
            cache.register_loaded(digests[row], blocks[row], first + row)
        arrival.give_back()
        load.table += blocks
        load.brought.append((load.parts[0].source.name, first, len(load.table)))
        if len(blocks) < len(digests):
            load.cancel()
        return len(blocks)

    def _end(self, load: _Load) -> None:
        key = load.seq.key
        load.cancel()
        for digest in load.seq.block_digests[load.start : load.end]:
            if self._leaders.get(digest) is load:
                del self._leaders[digest]
        self._cache.unhold(load.table)
        if load.brought:
            self._loaded[key] = load.brought
        if len(load.table) == load.end:
            for name in {name for name, _, _ in load.brought}:
                self._rests.was_in_time(name, self._wait_s(load))
        del self._loads[key]
        for follower in load.followers:
            del self._following[follower.key]
        self._done |= {seq.key: seq for seq in (load.seq, *load.followers)}

    # Writing

    def started(self, seq: Sequence, cached_tokens: int, seen_tokens: int) -> Counter[str]:
        """Note what of a prompt is used again, as it was found when it was first started. How many
        of the cached tokens each source brought."""
        size = self._cache.block_size
        if self._used is not None:
            self._worth[seq.key] = num_worth_keeping(cached_tokens, seen_tokens, size)
        brought: Counter[str] = Counter()
        for name, first, end in self._loaded.pop(seq.key, ()):
            brought[name] += max(0, min(cached_tokens, end * size) - first * size)
        self.hit_tokens += brought
        return brought

    def keep(self, seq: Sequence, num_tokens: int) -> None:
        """Count leading tokens of a prompt that was just started as used again: a lease was asked
        for on them."""
        if self._used is not None:
            num_blocks = num_tokens // self._cache.block_size
            self._worth[seq.key] = max(self._worth.get(seq.key, 0), num_blocks)

    def computed(self, seq: Sequence) -> None:
        """Queue those of its blocks to be written that are registered and worth it."""
        key = seq.key
        worth = self._worth.get(key)
        if worth is None or self._used is None:
            return
        first, end = self._num_queued.get(key, 0), min(worth, seq.num_registered_blocks)
        self._used.queue(seq.block_digests[first:end])
        self._num_queued[key] = end
        if end >= worth:
            del self._worth[key], self._num_queued[key]

    def write(self) -> None:
        """Copy blocks to tiers, as many as there is room for between two steps."""
        if self._evicted is not None:
            self._evicted.queue(self._watch.find())
        for writer in self._writers:
            writer.write()


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges that ascending numbers are made of."""
    start = 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            yield numbers[start], numbers[place - 1] + 1
            start = place
