"""Those that hold blocks, and who of them gives them up for whom.

Knows neither blocks nor steps.

They are kept by `Sequence.precedence`: the higher lane first, in a lane the earlier arrival. Who is
halted (its request is paused) keeps its blocks and takes no step; it gives way before all others,
to anybody. Beside those,

  - a running sequence that has to grow takes blocks of a later one of its own lane, or of a lower
    lane with a higher counter; the first of all takes them of whom it wants, so that one always
    gets on;
  - a waiting one takes them of lower lanes with higher counters than its own lane's.

Of several lanes the one with the highest counter gives first, in it the latest arrival.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain

from engine.fairness import LANE_RANKS, LANE_WEIGHTS, FairShare
from engine.protocol import Lane
from engine.sequence import Sequence

_LANES: tuple[Lane, ...] = tuple(LANE_WEIGHTS)


def _precedence(seq: Sequence) -> tuple[int, int, int]:
    return seq.precedence


def _remove(queue: list[Sequence], seq: Sequence) -> bool:
    at = 0
    if not queue or queue[0] is not seq:
        at = bisect_left(queue, seq.precedence, key=_precedence)
        if at == len(queue) or queue[at] is not seq:
            return False
    del queue[at]
    return True


class RunningSequences:
    def __init__(self, share: FairShare) -> None:
        self._share = share
        self.active: list[Sequence] = []
        """Those that take steps."""
        self.halted: list[Sequence] = []
        self.num_active: dict[Lane, int] = dict.fromkeys(LANE_WEIGHTS, 0)

    def __len__(self) -> int:
        return len(self.active) + len(self.halted)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self.active, self.halted)

    def add(self, seq: Sequence) -> None:
        if not self.active or self.active[-1].precedence < seq.precedence:
            self.active.append(seq)  # as mostly: it came last, into the lowest lane that runs
        else:
            insort(self.active, seq, key=_precedence)
        self.num_active[seq.lane] += 1

    def remove(self, seq: Sequence) -> None:
        if _remove(self.active, seq):
            self.num_active[seq.lane] -= 1
        else:
            _remove(self.halted, seq)

    def halt(self, seq: Sequence) -> None:
        self.remove(seq)
        insort(self.halted, seq, key=_precedence)

    def go_on(self, seq: Sequence) -> None:
        _remove(self.halted, seq)
        self.add(seq)

    def victim_of(self, seq: Sequence) -> Sequence | None:
        """Return who gives way to an active sequence that has to grow; None: it has to wait
        itself.
        """
        if self.halted:
            return self.halted[-1]
        counter_of, rank = self._share.lane_counter, LANE_RANKS[seq.lane]
        is_first, mine = self.active[0] is seq, counter_of(seq.lane)
        found: list[tuple[float, int, Sequence]] = []
        for lower in range(rank, len(_LANES)):
            last = self._last_of(lower)
            counter = counter_of(_LANES[lower])
            if (
                last is not None
                and last is not seq
                and (lower == rank or counter > mine or is_first)
            ):
                found.append((counter, lower, last))
        return max(found)[2] if found else None

    def victims_of(self, lane: Lane) -> list[Sequence]:
        """Return the sequences that give way to a waiting sequence of that lane, in this order."""
        victims = self.halted[::-1]
        if self.num_active[lane] == len(self.active):
            return victims  # as mostly: nobody runs in another lane
        counter_of, rank = self._share.lane_counter, LANE_RANKS[lane]
        lower = [
            (counter_of(other), LANE_RANKS[other])
            for other in _LANES[rank + 1 :]
            if self.num_active[other] and counter_of(other) > counter_of(lane)
        ]
        for _, other_rank in sorted(lower, reverse=True):
            victims += self.active[self._start_of(other_rank) : self._start_of(other_rank + 1)][
                ::-1
            ]
        return victims

    def _start_of(self, rank: int) -> int:
        return bisect_left(self.active, (rank, -1, -1), key=_precedence)

    def _last_of(self, rank: int) -> Sequence | None:
        if self.num_active[_LANES[rank]] == 0:
            return None
        return self.active[self._start_of(rank + 1) - 1]

    def check_integrity(self, active: list[Sequence], halted: list[Sequence]) -> None:
        """AssertionError unless exactly these hold blocks."""
        assert self.active == sorted(active, key=_precedence), "the running queue is wrong"
        assert self.halted == sorted(halted, key=_precedence), "others are halted than should be"
        for lane, number in self.num_active.items():
            assert number == sum(seq.lane == lane for seq in active), f"lane {lane}: miscounted"
