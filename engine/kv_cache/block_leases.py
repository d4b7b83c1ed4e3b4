"""Blocks that are kept for a time because somebody paid for it: the leases on cached prefixes.

Knows blocks as numbers and tenants as names; the clock is given.

A lease is on all blocks of a prefix, from the first one on, so a block under lease has its parent
under the same one. The blocks that it adds to what was under lease already count against its
tenant, who may have `max_blocks_per_tenant`. It lasts `ttl_s` from its last use on.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count

SLACK = 64
"""Leases that ended before their time and stand among those to expire: so many, or as many as are
open."""


@dataclass(slots=True, eq=False)
class Lease:
    """One prefix under lease. `num_added`: its last blocks, which were under none before."""

    lease_id: str
    tenant: str
    blocks: tuple[int, ...]
    num_added: int
    ttl_s: float
    granted_s: float
    expires_s: float
    ended_s: float = math.inf

    @property
    def is_open(self) -> bool:
        return self.ended_s == math.inf


class CacheLeases:
    """All leases of one cache. Those that ended stand in a list until `take_ended`."""

    def __init__(self, max_blocks_per_tenant: int, clock: Callable[[], float]) -> None:
        """max_blocks_per_tenant: 0: nothing is leased. clock: monotonic seconds."""
        assert max_blocks_per_tenant >= 0
        self.max_blocks_per_tenant = max_blocks_per_tenant
        self.num_by_tenant: Counter[str] = Counter()
        """Blocks reserved and under lease."""
        self._clock = clock
        self._ended: list[Lease] = []
        self._num_leases: Counter[int] = Counter()
        self._ending_at: dict[int, list[Lease]] = {}
        """By its last block."""
        self._by_expiry: list[tuple[float, int, Lease]] = []
        """A heap; of a lease that was used since, the time is too early."""
        self._number = count()
        self._num_open = 0

    @property
    def num_blocks(self) -> int:
        """Under lease."""
        return len(self._num_leases)

    def holds(self, block: int) -> bool:
        return block in self._num_leases

    def num_held(self, table: Iterable[int]) -> int:
        """How many blocks of a table, from its first one on, are under lease."""
        num_held = 0
        for block in table:
            if block not in self._num_leases:
                break
            num_held += 1
        return num_held

    def reserve(self, tenant: str, num_blocks: int) -> bool:
        """Set aside what a lease may add. False, and nothing is, beyond the tenant's bound."""
        if self.num_by_tenant[tenant] + num_blocks > self.max_blocks_per_tenant:
            return False
        if num_blocks:
            self.num_by_tenant[tenant] += num_blocks
        return True

    def give_up(self, tenant: str, num_blocks: int) -> None:
        """Give up blocks that were reserved, or under lease."""
        left = self.num_by_tenant[tenant] - num_blocks
        assert left >= 0, f"{tenant} gives up {num_blocks} blocks, and has {left + num_blocks}"
        if left:
            self.num_by_tenant[tenant] = left
        else:
            del self.num_by_tenant[tenant]

    def grant(
        self, lease_id: str, tenant: str, blocks: Iterable[int], *, added: int, ttl_s: float
    ) -> None:
        """blocks: of the whole prefix, held by a table. added: those of them that were reserved."""
        now_s = self._clock()
        lease = Lease(lease_id, tenant, tuple(blocks), added, ttl_s, now_s, now_s + ttl_s)
        self._num_leases.update(lease.blocks)
        self._ending_at.setdefault(lease.blocks[-1], []).append(lease)
        self._num_open += 1
        if len(self._by_expiry) > 2 * self._num_open + SLACK:
            self._by_expiry = [due for due in self._by_expiry if due[2].is_open]
            heapq.heapify(self._by_expiry)
        heapq.heappush(self._by_expiry, (lease.expires_s, next(self._number), lease))

    def use(self, table: Iterable[int]) -> None:
        """Every lease on a prefix of `table` begins anew."""
        now_s = self._clock()
        for block in table:
            for lease in self._ending_at.get(block, ()):
                lease.expires_s = now_s + lease.ttl_s

    def expire(self) -> list[int]:
        """End what is over. The blocks that no lease is on any more, a child before its parent."""
        now_s = self._clock()
        freed: list[int] = []
        while self._by_expiry and self._by_expiry[0][0] <= now_s:
            _, number, lease = heapq.heappop(self._by_expiry)
            if lease.expires_s > now_s:
                heapq.heappush(self._by_expiry, (lease.expires_s, number, lease))
            elif lease.is_open:
                freed += self._end(lease, now_s)
        return freed

    def break_off(self, block: int) -> list[int]:
        """`block`, which has no child under lease, is needed by others: end what is on it. The
        blocks that no lease is on any more, a child before its parent, so it comes first."""
        leases = self._ending_at[block]
        assert len(leases) == self._num_leases[block], f"block {block} has a child under lease"
        now_s = self._clock()
        return [freed for lease in tuple(leases) for freed in self._end(lease, now_s)]

    def take_ended(self) -> list[Lease]:
        """Return the leases that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def check_integrity(self, reserved: Iterable[tuple[str, int]]) -> None:
        """AssertionError unless the counts are those of the open leases and of what is reserved:
        (tenant, blocks)."""
        leases = [lease for ending in self._ending_at.values() for lease in ending]
        assert all(lease.is_open for lease in leases), "a lease that ended is on a block"
        assert len(leases) == self._num_open
        counted = Counter(block for lease in leases for block in lease.blocks)
        assert counted == self._num_leases, "leases miscounted"
        added: Counter[str] = Counter()
        for lease in leases:
            added[lease.tenant] += lease.num_added
        for tenant, num_blocks in reserved:
            added[tenant] += num_blocks
        assert added == self.num_by_tenant, "tenants' blocks miscounted"
        assert all(number <= self.max_blocks_per_tenant for number in added.values())
        due = {lease for _, _, lease in self._by_expiry}
        assert due.issuperset(leases), "a lease that never expires"

    def _end(self, lease: Lease, now_s: float) -> list[int]:
        lease.ended_s = now_s
        ending = self._ending_at[lease.blocks[-1]]
        ending.remove(lease)
        if not ending:
            del self._ending_at[lease.blocks[-1]]
        self._num_open -= 1
        self.give_up(lease.tenant, lease.num_added)
        self._ended.append(lease)
        freed = []
        for block in reversed(lease.blocks):
            self._num_leases[block] -= 1
            if not self._num_leases[block]:
                del self._num_leases[block]
                freed.append(block)
        return freed
