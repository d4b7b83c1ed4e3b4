"""Chooses who is served next: virtual token counters of the lanes, and of the tenants in each lane.
And who may wait at all, where a queue is bounded.

Knows no clock, no request and no queue: it is told who waits, who is charged, and says who is next.

This is the Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI
2024), once for the lanes and once more for the tenants of each. What somebody is served is charged
to its counter, divided by its weight. Next is the lane with the lowest counter among those in which
somebody waits, and in it the tenant with the lowest. Hence, as in the paper: of two that wait all
the while, the services over their weights differ by at most a constant,

    2 * max(INPUT_COST * longest input, OUTPUT_COST * tokens that run at once) / least weight

however long they wait and whoever else comes and goes; and nobody is held back while there is room.

Who was away has saved nothing up: a tenant that begins to wait is lifted to the lowest counter of
those that wait, or, if none do, to that of the one that waited last. The same goes for a lane. That
level never falls; so a tenant without any request whose counter is not above it is forgotten: it
would come back no different. Nobody is promoted by age.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, Generic, TypeVar

from engine.protocol import Lane

LANE_WEIGHTS: Final[Mapping[Lane, int]] = {"interactive": 16, "agentic": 4, "batch": 1}
"""From the highest lane to the lowest; of lanes with one counter the higher goes first."""
LANE_RANKS: Final[Mapping[Lane, int]] = {lane: rank for rank, lane in enumerate(LANE_WEIGHTS)}
INPUT_COST = 1
"""The cost of a computed prompt token; a cached one costs nothing."""
OUTPUT_COST = 2
"""The cost of a generated token (the paper's w_p and w_q)."""
MAX_IDLE_TENANTS = 10_000
"""How many tenants without requests a lane remembers; beyond it, those with the lowest counters,
who would be lifted the least, are forgotten first."""
TENANT_SHARE: Final = 3
"""A bounded queue admits a tenant while it holds at most this many times the free places. So one
flooding tenant has three quarters of it, two have three sevenths each, and a newcomer still finds
room (Choudhury and Hahne, "Dynamic Queue Length Thresholds", 1998, with alpha = 3)."""
_SLACK = 64
"""Entries of a heap that may be stale beside as many as are not, before it is built anew."""

K = TypeVar("K", bound=Hashable)


class _Account(Generic[K]):
    __slots__ = ("counter", "entry", "key", "num_open", "num_waiting")

    def __init__(self, key: K) -> None:
        self.key = key
        self.counter = 0.0
        self.num_open = 0
        """Requests; while there are any it is not forgotten."""
        self.num_waiting = 0
        """Those that wait."""
        self.entry: _Entry[K] | None = None
        """Its one valid entry in a heap: of those that wait, or of those without requests."""


class QueueBound:
    """A bound on a queue, which counts who has how many of its places. A request that names no
    tenant is of nobody who could crowd others out: it is bounded by the places alone.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_taken = 0
        self._of: dict[str, int] = {}

    def has_room(self, tenant: str) -> bool:
        left = self.most - self.num_taken
        if left <= 0 or not tenant:
            return left > 0
        return self._of.get(tenant, 0) < TENANT_SHARE * left

    def take(self, tenant: str) -> None:
        self.num_taken += 1
        self._of[tenant] = self._of.get(tenant, 0) + 1

    def give_back(self, tenant: str) -> None:
        self.num_taken -= 1
        left = self._of[tenant] - 1
        if left:
            self._of[tenant] = left
        else:
            del self._of[tenant]

    def clear(self) -> None:
        self.num_taken = 0
        self._of.clear()

    def check_integrity(self, tenants: Collection[str]) -> None:
        """AssertionError unless exactly the requests of these are in the queue."""
        assert self.num_taken == len(tenants) <= max(self.most, 0), "a queue's places miscounted"
        assert self._of == Counter(tenants), "a tenant's places miscounted"


_Entry = tuple[float, int, _Account[K]]
"""The counter when the entry was made (counters only grow, so it is a lower bound), a number that
tells entries apart, the account."""


class _Counters(Generic[K]):
    """The virtual counters of those that share something. All operations are O(log n), amortised;
    `charge` is O(1).
    """

    def __init__(self) -> None:
        self.accounts: dict[K, _Account[K]] = {}
        self._waiting: list[_Entry[K]] = []
        self._idle: list[_Entry[K]] = []
        self._num_waiting = self._num_idle = self._num_entries = 0
        self._last: _Account[K] | None = None
        """The account that stopped waiting last."""

    def open(self, key: K) -> None:
        account = self.accounts.get(key)
        if account is None:
            account = self.accounts[key] = _Account(key)
        elif account.num_open == 0:
            account.entry = None
            self._num_idle -= 1
        account.num_open += 1

    def close(self, key: K) -> None:
        account = self.accounts[key]
        account.num_open -= 1
        assert account.num_open >= account.num_waiting >= 0, f"{key} was closed too often"
        if account.num_open == 0:
            self._num_idle += 1
            self._push(self._idle, account, self._num_idle)
            self._forget()

    def wait(self, key: K) -> None:
        account = self.accounts[key]
        account.num_waiting += 1
        assert account.num_waiting <= account.num_open, f"{key} waits with no request"
        if account.num_waiting == 1:
            account.counter = max(account.counter, self.level())
            self._num_waiting += 1
            self._push(self._waiting, account, self._num_waiting)

    def unwait(self, key: K) -> None:
        account = self.accounts[key]
        account.num_waiting -= 1
        assert account.num_waiting >= 0, f"{key} did not wait"
        if account.num_waiting == 0:
            account.entry = None
            self._num_waiting -= 1
            self._last = account

    def charge(self, key: K, amount: float) -> None:
        self.accounts[key].counter += amount

    def first(self) -> _Account[K] | None:
        """The waiting account with the lowest counter; of several the one that waits the longest
        without having been charged."""
        return self._top(self._waiting)

    def level(self) -> float:
        """Return what a counter is lifted to; it never falls."""
        first = self.first()
        if first is not None:
            return first.counter
        return 0.0 if self._last is None else self._last.counter

    def _top(self, heap: list[_Entry[K]]) -> _Account[K] | None:
        while heap:
            entry = heap[0]
            account = entry[2]
            if account.entry is not entry:
                heappop(heap)
            elif account.counter != entry[0]:
                heapreplace(heap, self._entry(account))
            else:
                return account
        return None

    def _entry(self, account: _Account[K]) -> _Entry[K]:
        self._num_entries += 1
        account.entry = (account.counter, self._num_entries, account)
        return account.entry

    def _push(self, heap: list[_Entry[K]], account: _Account[K], num_valid: int) -> None:
        heappush(heap, self._entry(account))
        if len(heap) > 2 * num_valid + _SLACK:
            heap[:] = [entry for entry in heap if entry[2].entry is entry]
            heapify(heap)

    def _forget(self) -> None:
        level = self.level()
        while (lowest := self._top(self._idle)) is not None:
            if lowest.counter > level and self._num_idle <= MAX_IDLE_TENANTS:
                return
            lowest.entry = None
            self._num_idle -= 1
            del self.accounts[lowest.key]


class FairShare:
    """A request goes through `enter`, `wait`, `unwait` (perhaps several times) and `leave`, and is
    charged for whenever it is served. Not thread-safe."""

    def __init__(self) -> None:
        self._lanes: _Counters[Lane] = _Counters()
        self._tenants: dict[Lane, _Counters[str]] = {lane: _Counters() for lane in LANE_WEIGHTS}
        for lane in LANE_WEIGHTS:
            self._lanes.open(lane)  # for good: lanes are not forgotten

    def enter(self, lane: Lane, tenant: str) -> None:
        """There is one more request of the tenant in that lane."""
        self._lanes.open(lane)
        self._tenants[lane].open(tenant)

    def leave(self, lane: Lane, tenant: str) -> None:
        """There is one less; it waits no longer."""
        self._tenants[lane].close(tenant)
        self._lanes.close(lane)

    def wait(self, lane: Lane, tenant: str) -> None:
        """One more of its requests waits."""
        self._lanes.wait(lane)
        self._tenants[lane].wait(tenant)

    def unwait(self, lane: Lane, tenant: str) -> None:
        """One less does."""
        self._tenants[lane].unwait(tenant)
        self._lanes.unwait(lane)

    def charge(self, lane: Lane, tenant: str, weight: float, tokens: float) -> None:
        """It was served; `tokens` at their cost. weight: of the tenant in its lane, above 0."""
        self._lanes.charge(lane, tokens / LANE_WEIGHTS[lane])
        self._tenants[lane].charge(tenant, tokens / weight)

    def first(self, *, beside: Collection[Lane] = ()) -> tuple[Lane, str] | None:
        """Return who is next of those that wait in any lane but these; None: nobody waits there."""
        lowest: _Account[Lane] | None = None
        for account in self._lanes.accounts.values():  # from the highest lane
            if (
                account.num_waiting
                and (lowest is None or account.counter < lowest.counter)
                and account.key not in beside
            ):
                lowest = account
        if lowest is None:
            return None
        tenant = self._tenants[lowest.key].first()
        assert tenant is not None, f"nobody waits in lane {lowest.key}"
        return lowest.key, tenant.key

    def is_waiting(self, lane: Lane) -> bool:
        """Whether anybody waits in that lane."""
        return self._lanes.accounts[lane].num_waiting > 0

    def lane_counter(self, lane: Lane) -> float:
        return self._lanes.accounts[lane].counter

    def place(self, lane: Lane, tenant: str) -> tuple[float, int, float]:
        """Sorts tenants that have a request: who comes first is to be served first."""
        return (
            self._lanes.accounts[lane].counter,
            LANE_RANKS[lane],
            self._tenants[lane].accounts[tenant].counter,
        )

    @property
    def num_tenants(self) -> int:
        """Those that are remembered, of all lanes; one in two lanes counts twice."""
        return sum(len(tenants.accounts) for tenants in self._tenants.values())
