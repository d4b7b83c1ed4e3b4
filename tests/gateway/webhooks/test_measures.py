"""Every measure of an alert is in each place that ARCHITECTURE.md names for one."""

from __future__ import annotations

import re
from typing import get_args

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.alerts.alerts import CreditMeasure, MoneyMeasure, TokenMeasure, kind_of_measure
from gateway.principal import PLAN_LIMITS
from gateway.wire.admin.webhook_events import EventType

MEASURES = {
    *get_args(MoneyMeasure),
    *get_args(TokenMeasure),
    *(limit.name for limit in PLAN_LIMITS if limit.raises_alerts),
}


def test_every_measure_has_an_event_that_endpoints_can_subscribe_to() -> None:
    kinds = {kind_of_measure(each) for each in MEASURES}
    assert {kind.event for kind in kinds} - {*get_args(EventType)} == set()
    in_usd = {each for each in MEASURES if kind_of_measure(each).unit == "usd"}
    assert in_usd == {*get_args(MoneyMeasure)} > {*get_args(CreditMeasure)}


async def test_the_migrations_allow_exactly_these_measures(db: AsyncEngine) -> None:
    async with db.connect() as conn:
        text = await conn.scalar(
            sa.text(
                "SELECT pg_get_constraintdef(oid) FROM pg_constraint"
                " WHERE conname = 'alerts_measure'"
            )
        )
    assert {*re.findall(r"'(\w+)'", str(text))} == MEASURES
