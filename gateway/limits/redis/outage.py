"""Bridges an outage of Redis, from its going away to its being back with all that happened
meanwhile.

One task probes, and what it probes with is the debit of what was granted here: when that is taken,
Redis is back. Settles that came meanwhile wait here and follow.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

import msgspec

from foundation.request_context import outside_requests
from foundation.tasks import LogAndContinue, end_tasks
from gateway.ids import uuid7
from gateway.limits.redis.keys import org_keys, org_of
from gateway.limits.redis.local_buckets import BURST_PARTS, SHARE, LocalBuckets, LocalGrant
from gateway.limits.redis.scripts import LimiterUnavailable, ScriptFailed, Scripts

log = logging.getLogger(__name__)

FIRST_PROBE_S, MAX_PROBE_S = 0.05, 1.0
OTHERS = 1.5
"""Waits between two probes until the other gateways have heard of Redis, too, and posted what they
let pass: who asked it before would be given what they have used."""
MAX_DEFERRED = 100_000
"""Settles that wait; beyond it the oldest are left to their leases' expiry."""
DEFERRED_AT_A_TIME = 64
DEBIT_TTL_MS = 900_000


MAX_ROUNDS = 4
"""How often posting repeats for grants that were made while it ran."""
NOBODY = org_keys("-")
"""To probe with, where nothing was granted."""


class ScriptCall(msgspec.Struct, frozen=True):
    """A call of a script."""

    keys: list[str]
    asked: Any


class Debit(msgspec.Struct, frozen=True):
    """The units granted here of one scope, as they are posted: under its id it is taken once."""

    id: str
    key: str
    grants: list[LocalGrant]

    def to_call(self) -> ScriptCall:
        charges = [
            (*msgspec.structs.astuple(each.bucket), each.least, each.most, owed_at_most(each))
            for each in self.grants
        ]
        keys = [*org_keys(org_of(self.key)), self.key]
        return ScriptCall(keys, (self.id, DEBIT_TTL_MS, [charges]))


def owed_at_most(grant: LocalGrant) -> int:
    """Return what a bucket may come to lack by what is posted, where it would lack less without:
    what it holds, and what all gateways let pass at once."""
    return math.ceil(grant.bucket.burst * (1 + SHARE / BURST_PARTS))


class Outage:
    """The state of an outage; one per limiter, idle while Redis is there."""

    def __init__(self, scripts: Scripts, local: LocalBuckets) -> None:
        self._scripts, self._local = scripts, local
        self._debits: list[Debit] = []
        self._deferred: OrderedDict[str, ScriptCall] = OrderedDict()
        self._mending: asyncio.Task[None] | None = None

    def begins(self) -> None:
        self._local.begins()
        if self._mending is None or self._mending.done():
            self._mending = asyncio.create_task(
                self._mend(), name="wait for Redis", context=outside_requests()
            )

    @property
    def has_deferred(self) -> bool:
        """True while settles wait for Redis."""
        return bool(self._deferred)

    async def close(self) -> None:
        if self._mending is not None:
            await end_tasks(self._mending)

    def defer(self, lease_id: str, call: ScriptCall) -> None:
        """Settle it when Redis is back."""
        self._deferred[lease_id] = call
        if len(self._deferred) > MAX_DEFERRED:
            dropped, _ = self._deferred.popitem(last=False)
            log.warning("the lease %s is left to its expiry", dropped)

    async def _mend(self) -> None:
        """Wait until Redis is back, and has stayed until all that waited for it is done."""
        wait_s = FIRST_PROBE_S
        log_and_continue = LogAndContinue(log, "Redis is not looked for")
        while self._scripts.is_away or self._deferred:
            await asyncio.sleep(wait_s)
            wait_s = min(MAX_PROBE_S, 2 * wait_s)
            with log_and_continue:
                try:
                    if self._scripts.is_away:
                        await self._scripts.probe("renew", NOBODY, (0, []))
                        await self._post_grants()
                        await asyncio.sleep(OTHERS * wait_s)
                        await self._post_grants()
                        self._scripts.closed()
                    await self._settle_deferred()
                except LimiterUnavailable as error:
                    log.debug("still away: %s", error)

    async def _post_grants(self) -> None:
        """Raises: LimiterUnavailable; what is left is posted by the next probe, under its id."""
        for _ in range(MAX_ROUNDS):
            if not self._debits:
                found = self._local.grants()
                self._debits = [
                    Debit(f"debit:{uuid7().hex}", key, grants) for key, grants in found.items()
                ]
            if not self._debits:
                break
            while self._debits:
                debit = self._debits[0]
                call = debit.to_call()
                with suppress(ScriptFailed):  # of one org, and logged: no other waits for it
                    await self._scripts.probe("debit", call.keys, call.asked)
                self._local.taken(debit.key, debit.grants)
                del self._debits[0]

    async def _settle_deferred(self) -> None:
        """Raises: LimiterUnavailable."""
        while self._deferred:
            some = list(self._deferred.items())[:DEFERRED_AT_A_TIME]
            calls = (self._scripts.call("settle", call.keys, call.asked) for _, call in some)
            for (lease_id, _), answer in zip(some, await gather(*calls), strict=True):
                if isinstance(answer, LimiterUnavailable) and not isinstance(answer, ScriptFailed):
                    raise answer
                self._deferred.pop(lease_id, None)


async def gather(*calls: Awaitable[Any]) -> list[Any]:
    """Return answers and errors."""
    return await asyncio.gather(*calls, return_exceptions=True)
