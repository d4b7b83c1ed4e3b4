"""Settles after the fact attempts that a crash left open and tokens that nobody received."""

from __future__ import annotations

import logging

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.events import UsageEvent
from billing.ingestion.settle_late import settle_orphan
from billing.pricing.price_book import PriceBook
from billing.pricing.rating import rate
from engine.protocol import OrphanedUsage
from foundation.tasks import TaskSet
from gateway.inference.metering import from_engine
from gateway.limits.limiter import Limiter
from gateway.limits.outcomes import Units
from gateway.limits.spending import to_nano
from gateway.telemetry.metrics import Telemetry

log = logging.getLogger(__name__)


def to_used(event: UsageEvent) -> Units:
    used = event.quantities
    return Units(
        input_tokens=used.input_total,
        output_tokens=used.output_total,
        cost_nano=to_nano(rate(used, event.attempt.prices).amount_pico),
    )


def sum_of(one: Units, other: Units) -> Units:
    """Add what attempts of one request used: one lease holds it."""
    return Units(
        input_tokens=one.input_tokens + other.input_tokens,
        output_tokens=one.output_tokens + other.output_tokens,
        cost_nano=one.cost_nano + other.cost_nano,
    )


class CrashSettlement:
    """Settles in the background what no running generation will."""

    def __init__(
        self,
        *,
        db: AsyncEngine,
        limiter: Limiter,
        tasks: TaskSet,
        price_book: PriceBook,
        telemetry: Telemetry,
    ) -> None:
        self._db, self._limiter, self._tasks = db, limiter, tasks
        self._price_book, self._telemetry = price_book, telemetry

    def recovered(self, events: list[UsageEvent]) -> None:
        """Count what was billed of attempts that died with their gateway, and give back what they
        had reserved."""
        for event in events:
            used = event.quantities
            self._telemetry.count_tokens(
                event.attempt.model,
                uncached=used.uncached_input + used.embedding_input,
                cache_read=used.cache_read,
                cache_write=used.cache_write_5m + used.cache_write_1h,
                output=used.output_total,
            )
            if event.disputed:
                self._telemetry.count_disputed(
                    event.disputed.upstream,
                    input_tokens=event.disputed.input_tokens,
                    output_tokens=event.disputed.output_tokens,
                )
        self.left(events)

    def left(self, events: list[UsageEvent]) -> None:
        """A gateway that died between CLOSE and settle has left its leases to expire with what it
        had last told. One that was settled all the same stays as it is."""
        self._tasks.spawn(self._settle_leases(events), name="settle leases of a dead gateway")

    async def _settle_leases(self, events: list[UsageEvent]) -> None:
        used: dict[tuple[str, str], Units] = {}
        for event in events:
            if event.kind == "usage":
                key = event.attempt.org, event.attempt.request_id
                used[key] = sum_of(used.get(key, Units()), to_used(event))
        for (org, request_id), units in used.items():
            await self._limiter.settle_lease(org, request_id, units)

    async def orphaned(self, model: str, orphan: OrphanedUsage) -> bool:
        """Book what the engine generated for a gateway that is gone and nobody was billed for.

        False keeps the orphan with the engine, which offers it again.
        """
        try:
            await settle_orphan(
                self._db,
                orphan.request_id,
                from_engine(orphan.usage),
                model=model,
                book=self._price_book,
            )
        except (SQLAlchemyError, OSError) as error:
            log.warning("orphan %s has to wait: %s", orphan.request_id, type(error).__name__)
            return False
        return True
