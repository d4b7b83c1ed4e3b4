"""A prepaid org's counter is funded by leases on its balance: topped up before they run dry.

The counter holds what was spent and is held, as any hard cap's does; beside it stands up to how
much, and until when (`fund.lua`). Requests read that, and Postgres is asked by tasks: when little
is left, while requests run, and, before one is refused, for it.

A request that does not fit in the lease waits for a top-up, a transaction of some milliseconds, and
is then admitted or refused for good: to be sent away with money left, and told to come back in a
moment, would cost it more than that. All that wait for an org wait for one top-up of what they need
together. Where the ledger does not answer within TOP_UP_TIMEOUT_S nobody can say, and it is told to
come back.

What has been leased is spent by whoever comes first, here or elsewhere: gateways share the counter,
and with it the lease, which outlives any of them and expires if all are gone. It is overdrawn by no
more than any hard cap is (`counters`), and by what ran when a lease expired that nobody could
renew, at most that lease.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import msgspec

from foundation.periodic import Periodic
from foundation.request_context import outside_requests
from foundation.tasks import LogAndContinue, end_tasks
from gateway.limits.counters import SpentUnknown
from gateway.limits.redis.keys import org_keys
from gateway.limits.redis.scripts import LimiterUnavailable, Scripts
from gateway.limits.spending import MAX_NANO
from gateway.lru import Lru

log = logging.getLogger(__name__)

TOP_UP_TIMEOUT_S = 2.0
RENEW_INTERVAL_S = 15.0
RENEW_BEFORE_S = 40.0
"""A lease that holds for less is renewed while its org is served."""
SHORT_S = 1.0
"""So long after a top-up fell short of what was wanted nobody asks for more."""
MAX_SHRINKS = 3
MAX_ORGS = 65_536
WHOLE = 1_000_000
ONLY_ASKED: Any = (0, 0, 0, 0, {})
"""The arguments of `fund.lua` that only ask."""

OrgCounter = tuple[str, str]
"""An org, and the key of the counter of all that it spends."""


class ModelFunding(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The funding of requests to one model."""

    funded_nano: int
    """Beyond what is for any."""
    refill_nano: int
    """When less is left, of both, and it is more than for any model."""


class Funding(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of the ledger, in nano-USD; all of it counts what was ever spent, too."""

    version: int
    funded_nano: int
    by_model: dict[str, ModelFunding]
    ttl_s: float
    """From before it was asked."""
    refill_nano: int
    """When less is left, it is time to ask again; 0: that would bring no more."""
    must_shrink: bool
    """It counts on what is no longer there: let go of what was told up to this version, and ask
    again."""


class Lender(Protocol):
    async def top_up(
        self, org_id: str, *, spent_nano: int, wanted_nano: int, released: int | None
    ) -> Funding:
        """Lend the org more of its balance. `spent_nano`: and held. `wanted_nano`: beyond that, by
        who waits. `released`: the version up to which all is let go. Raises: OSError."""
        ...


class NoLender:
    """The lender where nobody has paid in advance."""

    async def top_up(
        self, org_id: str, *, spent_nano: int, wanted_nano: int, released: int | None
    ) -> Funding:
        raise OSError("there is no ledger")


class _Round:
    """A top-up that has not begun yet, for all that wait for it."""

    task: asyncio.Task[None]

    def __init__(self) -> None:
        self.wanted_nano: dict[str, int] = {}
        """By model."""


class Funds:
    """The leases on the balances of orgs that have paid in advance; one per limiter. `clock`:
    monotonic seconds."""

    def __init__(
        self, scripts: Scripts, lender: Lender, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._scripts, self._lender, self._clock = scripts, lender, clock
        self.share: Callable[[], int] = lambda: WHOLE
        """Returns which part of what is left this cell may spend, in millionths."""
        self._next: dict[OrgCounter, _Round] = {}
        self._running: dict[OrgCounter, asyncio.Task[None]] = {}
        self._short: Lru[str, dict[str, float]] = Lru(MAX_ORGS)
        """By org when a top-up last fell short of what a model wanted."""
        self._served: set[OrgCounter] = set()
        """Since the last renewal."""
        self._log_and_continue = LogAndContinue(log, "a lease on a balance is not renewed")

    async def close(self) -> None:
        for task in list(self._running.values()):
            await end_tasks(task)

    def is_short(self, org_id: str, model: str) -> bool:
        """Tell whether more was asked for a moment ago, and was not there."""
        return model in self._short_now(org_id)

    def _short_now(self, org_id: str) -> dict[str, float]:
        since, now = self._short.get(org_id) or {}, self._clock()
        return {model: at for model, at in since.items() if now - at < SHORT_S}

    def has_changed(self, of: OrgCounter) -> None:
        """Note that an org's credit has changed: what was not there a moment ago may be, or the
        other way round."""
        self._short.drop(of[0])
        self._join(of)

    def serves(self, of: OrgCounter, *, is_low: bool) -> None:
        """Note that the org has requests here. `is_low`: little is left, so top up while requests
        go on."""
        if len(self._served) < MAX_ORGS:
            self._served.add(of)
        if is_low and of not in self._running:
            self._join(of)

    async def fund(self, of: OrgCounter, model: str, wanted_nano: int) -> None:
        """Wait until as much has been asked for. Raises: SpentUnknown."""
        joined = self._join(of)
        joined.wanted_nano[model] = joined.wanted_nano.get(model, 0) + wanted_nano
        await asyncio.shield(joined.task)  # others wait for it, too

    def _join(self, of: OrgCounter) -> _Round:
        waiting = self._next.get(of)
        if waiting is None:
            waiting = self._next[of] = _Round()
            before = self._running.get(of)
            work = self._top_up_after(before, of, waiting)
            context = outside_requests()  # others join it
            task = asyncio.create_task(work, name=f"top up {of[0]}", context=context)
            waiting.task = self._running[of] = task
            task.add_done_callback(lambda done: self._done(of, done))
        return waiting

    def _done(self, of: OrgCounter, task: asyncio.Task[None]) -> None:
        if self._running.get(of) is task:
            del self._running[of]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("the lease of %s was not topped up: %r", of[0], error)

    async def _top_up_after(
        self, before: asyncio.Task[None] | None, of: OrgCounter, waiting: _Round
    ) -> None:
        """Raises: SpentUnknown."""
        if before is not None:
            await asyncio.wait((before,))
        self._next.pop(of, None)
        try:
            async with asyncio.timeout(TOP_UP_TIMEOUT_S):
                await self._top_up(of, waiting.wanted_nano)
        except (LimiterUnavailable, OSError) as error:  # TimeoutError is an OSError
            raise SpentUnknown(of[0]) from error

    async def _top_up(self, of: OrgCounter, wanted_nano: Mapping[str, int]) -> None:
        """Raises: LimiterUnavailable, SpentUnknown, OSError."""
        org_id, _ = of
        began, released = self._clock(), None
        share = max(1, self.share()) / WHOLE
        spent, *_, booked = await self._script(of, ONLY_ASKED)
        # Of what is funded beyond the books of all cells, this one's share has to hold it.
        own_nano = int((1 / share - 1) * max(0, spent - booked))
        total_nano = min(MAX_NANO, math.ceil(sum(wanted_nano.values()) / share) + own_nano)
        for _ in range(MAX_SHRINKS):
            if spent < 0:
                return  # whoever asks next builds the counter
            found = await self._lender.top_up(
                org_id, spent_nano=spent, wanted_nano=total_nano, released=released
            )
            if not found.must_shrink:
                break
            released = found.version
            spent, *_ = await self._script(of, (released, 0, 0, 0, {}))
        else:
            raise SpentUnknown(org_id)
        holds_us = int((found.ttl_s - (self._clock() - began)) * 1_000_000)
        for model, wanted in wanted_nano.items():
            of_model = found.by_model.get(model)
            most = found.funded_nano + (of_model.funded_nano if of_model else 0)
            if min(MAX_NANO, most) - spent < wanted / share + own_nano:
                self._short.put(org_id, {**self._short_now(org_id), model: self._clock()})
        if holds_us > 0:
            by_model = {
                name: msgspec.structs.replace(each, refill_nano=int(each.refill_nano * share))
                for name, each in found.by_model.items()
            }
            refill_nano = int(found.refill_nano * share)
            told = (found.version, min(MAX_NANO, found.funded_nano), holds_us, refill_nano)
            await self._script(of, (*told, by_model))

    async def _script(self, of: OrgCounter, asked: Any) -> list[int]:
        """Raises: LimiterUnavailable."""
        found: list[int] = await self._scripts.call("fund", [*org_keys(of[0]), of[1]], asked)
        return found

    # ---- what is served keeps its lease

    def periodic_renewal(self, running: Callable[[], Iterable[OrgCounter]]) -> Periodic:
        """Return the renewal of the leases in use. `running`: those whose requests run here."""
        return Periodic(
            "renew funding",
            lambda: RENEW_INTERVAL_S,
            lambda: self._renew_served(running()),
            log=log,
            failure="leases on balances are not renewed",
            at_once=False,
        )

    async def _renew_served(self, running: Iterable[OrgCounter]) -> None:
        """Renew the lease of each; one that fails, whatever the error, costs no other its own."""
        served, self._served = self._served | set(running), set()
        for of in served:
            with self._log_and_continue:
                try:
                    await self._renew(of)
                except (LimiterUnavailable, SpentUnknown) as error:
                    log.warning("the lease of %s is not renewed: %r", of[0], error)

    async def _renew(self, of: OrgCounter) -> None:
        """Raises: LimiterUnavailable, SpentUnknown."""
        _, _, holds_us, left, _ = await self._script(of, ONLY_ASKED)
        if holds_us < RENEW_BEFORE_S * 1_000_000 or left < 0:
            await asyncio.shield(self._join(of).task)
