"""Attempts and events to test with, as strategies and as plain makers."""

from __future__ import annotations

import asyncio
from uuid import uuid4

from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.credits.lines import settle
from billing.events import COMPONENTS, Attempt, Price, PriceSet, Quantities, UsageEvent

NOON = 1_795_089_600.0
"""2026-11-19 12:00:00 UTC."""

PRICES: PriceSet = {
    "uncached_input": Price("penny:uncached_input:1", 100_000),
    "cache_read": Price("penny:cache_read:1", 10_000),
    "cache_write_5m": Price("penny:cache_write_5m:1", 0),
    "output": Price("penny:output:1", 400_000),
}

counts = st.integers(0, 2**40)
quantities = st.builds(Quantities, **dict.fromkeys(COMPONENTS, counts))


def an_attempt(
    attempt_id: str | None = None,
    *,
    org: str = "org_a",
    project: str = "proj_a",
    key: str = "key_a",
    model: str = "penny",
    lane: str = "interactive",
    prices: PriceSet = PRICES,
    admitted_at: float = NOON,
) -> Attempt:
    return Attempt(
        id=attempt_id or str(uuid4()),
        request_id="req_1",
        org=org,
        project=project,
        key=key,
        model=model,
        lane=lane,
        prices=prices,
        admitted_at=admitted_at,
    )


def an_event(
    attempt: Attempt | None = None, quantities: Quantities | None = None, **fields: object
) -> UsageEvent:
    attempt = attempt or an_attempt()
    used = quantities or Quantities(uncached_input=100, cache_read=16, output=20)
    return UsageEvent(
        attempt=attempt,
        quantities=used,
        occurred_at=attempt.admitted_at + 2.5,
        **fields,  # type: ignore[arg-type]
    )


async def pay_usage(db: AsyncEngine, org_id: str) -> None:
    """Pay an org's usage with its credits, also where a running application does it as well: that
    is woken by the usage, and `sweep` passes over the line that it holds just then."""
    while not await settle(db, org_id):
        await asyncio.sleep(0.01)
