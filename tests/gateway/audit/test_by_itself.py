"""A change that nobody requested stands in the operator's audit log, too."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.ledger.price_sets import sync_price_book
from billing.pricing.price_book import PriceBook
from gateway.audit.log import COMMAND_LINE
from gateway.audit.tables import entries
from gateway.auth.oauth.tokens import signing_keys
from gateway.auth.oauth.tokens.signing_keys import ROTATE_AFTER_S, KeyRing
from gateway.principal import Plan
from gateway.processes.bootstrap import bootstrap
from gateway.processes.database import record_prices
from gateway.tenancy.orgs import create_org
from tests.gateway.auth.oauth.tokens.test_signing_keys import CIPHER, Clock

PEPPER, PEPPER_ID = b"p" * 32, "1"
FIRST = """
[[price]]
model = "m"
valid_from = "2026-01-01"
uncached_input = "0.10"
output = "0.40"
"""
SECOND = FIRST.replace("2026-01-01", "2026-06-01").replace("0.10", "0.20")


def decoded(state: str | None) -> Any:
    return None if state is None else json.loads(state)


async def told(db: AsyncEngine, pattern: str) -> list[tuple[Any, ...]]:
    c = entries.c
    found = sa.select(c.action, c.target, c.before, c.after, c.actor_id)
    async with db.connect() as conn:
        rows = await conn.execute(found.where(c.action.like(pattern)).order_by(c.sequence))
        return [
            (row.action, row.target, decoded(row.before), decoded(row.after), row.actor_id)
            for row in rows
        ]


async def start(db: AsyncEngine, *plans: Plan) -> None:
    await bootstrap(db, pepper=PEPPER, pepper_id=PEPPER_ID, plans=plans, default_plan=plans[0].name)


async def test_what_the_settings_say_of_plans(db: AsyncEngine) -> None:
    small, large = Plan(name="small", tokens_per_minute=600), Plan(name="large")
    await start(db, small, large)
    made = await told(db, "plan.%")
    assert [row[:3] for row in made] == [
        ("plan.created", "small", None),
        ("plan.created", "large", None),
    ]
    assert made[0][3]["tokens_per_minute"] == 600 and made[0][4] == "settings"
    await start(db, small, large)
    assert await told(db, "plan.%") == made, "nothing has changed"
    await start(db, Plan(name="small", tokens_per_minute=700))
    changed = (await told(db, "plan.%"))[2:]
    assert changed[0][:4] == (
        "plan.updated",
        "small",
        {"tokens_per_minute": 600},
        {"tokens_per_minute": 700},
    )
    assert changed[1][:3] == ("plan.archived", "large", {"archived_at": None})


async def test_where_nobody_operates_plans_change_all_the_same(db: AsyncEngine) -> None:
    async with db.begin() as conn:
        await create_org(conn, name="acme", actor=COMMAND_LINE)
    await start(db, Plan(name="small"))
    assert await told(db, "plan.%") == []


async def test_what_the_price_books_say(db: AsyncEngine, tmp_path: Path) -> None:
    await start(db, Plan(name="small"))
    before = len(await told(db, "prices.%"))
    path = tmp_path / "book.toml"
    path.write_text(FIRST)
    for _ in range(2):
        await sync_price_book(db, PriceBook.load([path]), note=record_prices)
    [first] = (await told(db, "prices.%"))[before:]
    assert first[:2] == ("prices.loaded", "price_book") and first[4] == "settings"
    assert len(first[3]["added"]) == 2 and first[3]["closed"] == []
    path.write_text(FIRST + SECOND)
    await sync_price_book(db, PriceBook.load([path]), note=record_prices)
    [_, second] = (await told(db, "prices.%"))[before:]
    assert len(second[3]["added"]) == 2
    assert sorted(second[3]["closed"]) == sorted(first[3]["added"])


async def test_what_signing_keys_do_by_themselves(
    db: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await start(db, Plan(name="small"))
    monkeypatch.setattr(signing_keys, "RELOAD_S", 0.02)
    clock = Clock()
    ring = KeyRing(db, CIPHER, clock=clock)
    await ring.start()
    first = ring.ring.active.kid
    made = await told(db, "signing_key.%")
    assert [row[0] for row in made] == ["signing_key.created"] * 2
    assert first in [row[1] for row in made] and made[0][4] == "rotation"
    clock.now += ROTATE_AFTER_S + 1
    async with asyncio.timeout(30):
        while ring.ring.active.kid == first:
            await asyncio.sleep(0.01)
    await ring.close()
    [rotated] = (await told(db, "signing_key.%"))[2:]
    assert rotated[:2] == ("signing_key.rotated", ring.ring.active.kid)
