"""Every measure of an alert is in each place that ARCHITECTURE.md names for one."""

from __future__ import annotations

import re
from typing import get_args

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.alerts.alerts import MEASURES, CreditMeasure, Measure, TokenMeasure
from gateway.wire.admin.webhook_events import EventType


def test_every_measure_has_an_event_that_endpoints_can_subscribe_to() -> None:
    assert {*MEASURES} == {*get_args(Measure)} > {*get_args(CreditMeasure), *get_args(TokenMeasure)}
    assert {kind.event for kind in MEASURES.values()} - {*get_args(EventType)} == set()


async def test_the_migrations_allow_exactly_these_measures(db: AsyncEngine) -> None:
    async with db.connect() as conn:
        text = await conn.scalar(
            sa.text(
                "SELECT pg_get_constraintdef(oid) FROM pg_constraint"
                " WHERE conname = 'alerts_measure'"
            )
        )
    assert {*re.findall(r"'(\w+)'", str(text))} == {*MEASURES}
