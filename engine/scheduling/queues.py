"""Queues those that wait to be started: a queue for each tenant in each lane, and who has waited
for too long.

Knows neither blocks nor steps.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Generic, Protocol, TypeVar

from engine.fairness import LANE_WEIGHTS, FairShare
from engine.protocol import Lane

_SLACK = 64
"""Deadlines of what does not wait any more, beside as many as there are of what does."""


class Waiter(Protocol):
    """Nothing of it changes while it waits."""

    num_found: int
    """Those of its tokens that were cached when it began to wait: it is likely to skip them."""

    @property
    def lane(self) -> Lane: ...

    @property
    def tenant(self) -> str: ...

    @property
    def turn(self) -> tuple[int, int, int]:
        """Its priority, then when it came: the smaller goes first; no two have the same."""

    @property
    def num_tokens(self) -> int: ...


W = TypeVar("W", bound=Waiter)


def _turn(waiter: Waiter) -> tuple[int, int, int]:
    return waiter.turn


def _pairs(waiter: Waiter) -> float:
    """Return the pairs that the tokens to compute make with all before them: half the difference
    of two squares, which a float holds and adds up without an error."""
    return (waiter.num_tokens**2 - waiter.num_found**2) / 2


class WaitingRoom(Generic[W]):
    """The queues of what waits; the tenant of what is added has been entered in `share` before.
    Each tenant's are kept in order of priority, then of arrival: what was preempted waits before
    what came later.
    """

    def __init__(self, share: FairShare, num_cached: Callable[[W], int]) -> None:
        """num_cached: returns how many of a waiter's tokens are cached now, but for its last."""
        self._share, self._num_cached = share, num_cached
        self._queues: dict[Lane, dict[str, list[W]]] = {lane: {} for lane in LANE_WEIGHTS}
        self._num_waiting = 0
        self.num_tokens: dict[Lane, int] = dict.fromkeys(LANE_WEIGHTS, 0)
        """Tokens to compute: all but those found in the cache."""
        self.num_pairs: dict[Lane, float] = dict.fromkeys(LANE_WEIGHTS, 0.0)
        """Pairs of each of these tokens with all before it."""

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[W]:
        """Lane by lane, from the highest; in a lane tenant by tenant."""
        return (
            waiter
            for queues in self._queues.values()
            for queue in queues.values()
            for waiter in queue
        )

    def add(self, waiter: W) -> None:
        lane, tenant = waiter.lane, waiter.tenant
        queue = self._queues[lane].setdefault(tenant, [])
        if not queue or queue[-1].turn < waiter.turn:
            queue.append(waiter)  # as all of one priority do that come for the first time
        else:
            insort(queue, waiter, key=_turn)
        self._share.wait(lane, tenant)
        self._num_waiting += 1
        waiter.num_found = self._num_cached(waiter)
        self.num_tokens[lane] += waiter.num_tokens - waiter.num_found
        self.num_pairs[lane] += _pairs(waiter)

    def remove(self, waiter: W) -> bool:
        """False when it is not here."""
        lane, tenant = waiter.lane, waiter.tenant
        queues = self._queues[lane]
        queue = queues.get(tenant)
        if queue is None:
            return False
        at = 0  # as of all that start
        if queue[0] is not waiter:
            at = bisect_left(queue, waiter.turn, key=_turn)
            if at == len(queue) or queue[at] is not waiter:
                return False
        del queue[at]
        if not queue:
            del queues[tenant]
        self._share.unwait(lane, tenant)
        self._num_waiting -= 1
        self.num_tokens[lane] -= waiter.num_tokens - waiter.num_found
        self.num_pairs[lane] -= _pairs(waiter)
        return True

    def first(self, *, beside: Collection[Lane] = ()) -> W | None:
        """Return whose turn it is in any lane but these."""
        who = self._share.first(beside=beside)
        return None if who is None else self._queues[who[0]][who[1]][0]

    def any_shorter(self, num_tokens: int, limit: int) -> bool:
        """Whether one of `limit` that wait has fewer tokens."""
        return any(waiter.num_tokens < num_tokens for waiter in islice(self, limit))

    def check_integrity(self, expected: Collection[W]) -> None:
        """AssertionError unless exactly these wait, in order."""
        here = list(self)
        assert len(here) == self._num_waiting == len(expected), "waiting ones miscounted"
        assert set(map(id, here)) == set(map(id, expected)), "others wait than should"
        for lane, queues in self._queues.items():
            assert self._share.is_waiting(lane) == bool(queues), f"lane {lane}: who waits?"
            for tenant, queue in queues.items():
                assert queue == sorted(queue, key=_turn), "a queue is out of order"
                assert all((w.lane, w.tenant) == (lane, tenant) for w in queue), "wrong queue"
            waiters = [waiter for queue in queues.values() for waiter in queue]
            assert all(0 <= w.num_found < w.num_tokens for w in waiters), "more found than may be"
            total = sum(w.num_tokens - w.num_found for w in waiters)
            assert self.num_tokens[lane] == total, f"lane {lane}: tokens miscounted"
            assert self.num_pairs[lane] == sum(map(_pairs, waiters)), (
                f"lane {lane}: pairs miscounted"
            )


class Deadlines:
    """The deadlines of requests by their ids; whether one still counts is asked when it has
    passed.
    """

    def __init__(self, counts: Callable[[str, float], bool]) -> None:
        """counts: whether a request waits still, with this very deadline."""
        self._counts = counts
        self._heap: list[tuple[float, str]] = []

    def add(self, deadline_s: float, request_id: str, num_waiting: int) -> None:
        """num_waiting: how many requests wait at all; more than twice that is not kept."""
        heappush(self._heap, (deadline_s, request_id))
        if len(self._heap) > 2 * num_waiting + _SLACK:
            self._heap = [entry for entry in self._heap if self._counts(entry[1], entry[0])]
            heapify(self._heap)

    def passed(self, now_s: float) -> list[str]:
        """Those that wait still and whose deadline is over; they are not told again."""
        ids = []
        while self._heap and self._heap[0][0] <= now_s:
            deadline_s, request_id = heappop(self._heap)
            if self._counts(request_id, deadline_s):
                ids.append(request_id)
        return ids

    def __len__(self) -> int:
        return len(self._heap)
