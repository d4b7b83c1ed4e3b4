"""The books of Postgres, as the limiter's counters and its funding ask them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.credits.balance_leases import LeaseRequest
from billing.credits.lines import top_up
from billing.ledger.spend_totals import SpendAccount, read_booked, read_spend, used_by_hour
from gateway.limits.counters import BookedRequest
from gateway.limits.funding import Funding, ModelFunding
from gateway.limits.redis.scope_limits import ScopeName
from gateway.limits.spending import PICO_PER_NANO, Counter
from gateway.principal import PlanLimit

TIMEOUT_S = 5.0


class PostgresBooks:
    """`db`: of a role that sees every org's rows."""

    def __init__(self, db: AsyncEngine) -> None:
        self._db = db

    async def spent(self, org_id: str, counters: Sequence[Counter]) -> tuple[float, list[int]]:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                found = await read_spend(self._db, org_id, [to_account(each) for each in counters])
        except SQLAlchemyError as error:
            raise OSError(type(error).__name__) from error
        return found.watermark, found.amounts_pico

    async def booked(self, event_ids: Sequence[str]) -> Sequence[BookedRequest]:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                rows = await read_booked(self._db, event_ids)
        except SQLAlchemyError as error:
            raise OSError(type(error).__name__) from error
        return [BookedRequest(**msgspec.structs.asdict(row)) for row in rows]

    async def top_up(
        self, org_id: str, *, spent_nano: int, wanted_nano: int, released: int | None
    ) -> Funding:
        asked = LeaseRequest(
            spent_pico=spent_nano * PICO_PER_NANO,
            wanted_pico=wanted_nano * PICO_PER_NANO,
            released=released,
        )
        try:
            found = await top_up(self._db, org_id, asked)
        except SQLAlchemyError as error:
            raise OSError(type(error).__name__) from error
        return Funding(
            version=found.version,
            funded_nano=found.funded_pico // PICO_PER_NANO,
            by_model={
                name: ModelFunding(
                    funded_nano=pico // PICO_PER_NANO,
                    refill_nano=found.refill_by_model.get(name, 0) // PICO_PER_NANO,
                )
                for name, pico in found.by_model.items()
            },
            ttl_s=found.ttl_s,
            refill_nano=found.refill_pico // PICO_PER_NANO,
            must_shrink=found.must_shrink,
        )

    async def used_by_hour(
        self, org_id: str, scope: ScopeName, owner_id: str, limit: PlanLimit, since: float
    ) -> Sequence[tuple[float, int]]:
        asked: dict[str, Any] = {
            **to_owner(scope, owner_id),
            "since": datetime.fromtimestamp(since, UTC),
            "in_batches": limit.lane == "batch",
        }
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await used_by_hour(self._db, org_id, limit.counts, **asked)
        except SQLAlchemyError as error:
            raise OSError(type(error).__name__) from error


def to_owner(scope: ScopeName, owner_id: str) -> dict[str, str]:
    """A client stands in the books where a key would."""
    match scope:
        case "key_model" | "model":
            owner, _, model = owner_id.partition("/")
            return {"key" if scope == "key_model" else "project": owner, "model": model}
        case "key" | "client":
            return {"key": owner_id}
        case "project":
            return {"project": owner_id}
        case "org":
            return {}


def to_account(counter: Counter) -> SpendAccount:
    return SpendAccount(
        project=counter.owner_id if counter.scope == "project" else None,
        key=counter.owner_id if counter.scope == "key" else None,
        start=counter.start,
        end=counter.end,
    )
