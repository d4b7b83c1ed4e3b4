"""Keeps of prompts what requests ask to be kept, and reports what comes of it.

Knows block tables as numbers; no queue, no content.

What a request is told when it is first scheduled stands, whatever happens to it later: so much of
its prompt was under lease (which begins anew), so much will be. Room for that is reserved then, and
becomes a lease when the blocks have been computed. Whoever has no room left writes nothing: his
prompt is cached like any other.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from engine.kv_cache.block_leases import CacheLeases, Lease
from engine.protocol import Breakpoint, LeaseEnded, LeaseGranted
from engine.sequence import KeptTokens

LeaseEvent = LeaseGranted | LeaseEnded


@dataclass(frozen=True, slots=True)
class _Promise:
    """A lease on the first `num_blocks` of a prompt; the last `num_added` were reserved."""

    request_id: str
    lease_id: str
    tenant: str
    num_blocks: int
    num_added: int
    ttl_s: float


class PrefixLeases:
    """One per cache."""

    def __init__(self, leases: CacheLeases, block_size: int) -> None:
        self._leases = leases
        self._block_size = block_size
        self.promised: dict[str, list[_Promise]] = {}
        """By request, what is not computed yet."""
        self._granted: list[LeaseGranted] = []

    def begin(
        self, request_id: str, tenant: str, table: Items[int], breakpoints: Items[Breakpoint]
    ) -> KeptTokens:
        """table: what was found in the cache of its prompt, which it holds now."""
        leases, size = self._leases, self._block_size
        done = kept = min(leases.num_held(table), breakpoints[-1].num_tokens // size)
        leases.use(table[:kept])
        written: list[int] = []
        promises = []
        for index, each in enumerate(breakpoints):
            num_blocks = each.num_tokens // size
            num_added = max(0, num_blocks - done)
            if not leases.reserve(tenant, num_added):
                break
            if num_added:
                lease_id = f"{request_id}:{index}"
                promises.append(
                    _Promise(request_id, lease_id, tenant, num_blocks, num_added, each.ttl_s)
                )
                done = num_blocks
            written.append(num_added * size)
        if promises:
            self.promised[request_id] = promises
        written += [0] * (len(breakpoints) - len(written))
        return KeptTokens(kept * size, tuple(written))

    def computed(self, request_id: str, table: Items[int], num_blocks: int) -> None:
        """The first `num_blocks` of its table can be found by others: keep what was promised of
        them."""
        promises = self.promised.get(request_id)
        if promises is None:
            return
        while promises and promises[0].num_blocks <= num_blocks:
            self._grant(promises.pop(0), table)
        if not promises:
            del self.promised[request_id]

    def forget(self, request_id: str) -> None:
        """It ended: what was promised and not computed is nobody's."""
        for promise in self.promised.pop(request_id, ()):
            self._leases.give_up(promise.tenant, promise.num_added)

    def take_events(self) -> list[LeaseEvent]:
        """Since the last call: what was granted, and what ended, as its time was over or others
        needed the room."""
        granted, self._granted = self._granted, []
        return [*granted, *map(self._to_ended, self._leases.take_ended())]

    def check_integrity(self) -> None:
        """AssertionError unless each tenant's blocks are those promised and under lease."""
        promised = [each for promises in self.promised.values() for each in promises]
        self._leases.check_integrity((each.tenant, each.num_added) for each in promised)

    def _grant(self, promise: _Promise, table: Items[int]) -> None:
        self._leases.grant(
            promise.lease_id,
            promise.tenant,
            table[: promise.num_blocks],
            added=promise.num_added,
            ttl_s=promise.ttl_s,
        )
        num_tokens = promise.num_added * self._block_size
        granted = LeaseGranted(
            lease_id=promise.lease_id,
            request_id=promise.request_id,
            num_tokens=num_tokens,
            ttl_s=promise.ttl_s,
        )
        self._granted.append(granted)

    def _to_ended(self, lease: Lease) -> LeaseEnded:
        kept_s = lease.ended_s - lease.granted_s
        if lease.ended_s >= lease.granted_s + lease.ttl_s:
            kept_s = max(kept_s, lease.ttl_s)  # which rounding may have taken away
        return LeaseEnded(
            lease_id=lease.lease_id,
            num_tokens=lease.num_added * self._block_size,
            ttl_s=lease.ttl_s,
            kept_s=kept_s,
        )
