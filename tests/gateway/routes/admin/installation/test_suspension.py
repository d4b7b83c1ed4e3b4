"""Checks that an org that has not paid is told why, and is served again when it has, or when the
operator says so."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any

import pytest

from billing.invoices.accounts import BillingTerms, set_account
from billing.invoices.invoicer import Invoicer
from gateway.tenancy.changes import announce_suspensions
from tests.billing.invoices.billed import ACCOUNT_MADE, book, tokens
from tests.gateway.routes.admin.changing import ADMIN
from tests.gateway.routes.admin.conftest import World
from tests.pace import within

CHAT = "/v1/chat/completions"
ASKED = {"model": "far", "messages": [{"role": "user", "content": "hi"}]}
SERVED = 503
"""It was let in; there is no upstream."""


class Dunned:
    """An org whose invoice nobody pays, as its days go by."""

    def __init__(self, world: World) -> None:
        self.world, self.now = world, ACCOUNT_MADE
        self.path = ""
        self.invoicer = Invoicer(
            world.db,
            wall_clock=lambda: self.now.timestamp(),
            on_suspension=lambda: announce_suspensions(world.services.redis),
        )

    async def use(self, org_id: str) -> None:
        async with self.world.db.begin() as conn:
            await set_account(conn, org_id=org_id, terms=BillingTerms(net_days=0), now=ACCOUNT_MADE)
        await book(self.world.db, tokens(ACCOUNT_MADE, 1000, 10**10, org=org_id))

    async def state(self) -> Any:
        for each in (await self.world.call("GET", f"{ADMIN}/invoices?limit=1")).json()["data"]:
            self.path = f"{ADMIN}/invoices/{each['id']}"
            return each["state"]
        return "none"

    async def until(self, state: str) -> None:
        while await self.state() != state:
            self.now += timedelta(days=8)
            await self.invoicer.look()

    async def ask(self, expected: int) -> Any:
        """Workers hear of it within a second."""
        async with within(1.0):
            while True:
                answer = await self.world.call("POST", CHAT, ASKED, key=self.world.api_key)
                if answer.status_code == expected:
                    return answer
                await asyncio.sleep(0.05)


@pytest.fixture
async def dunned(world: World, org_id: str) -> Dunned:
    made = Dunned(world)
    await made.use(org_id)
    await made.until("reminder_3")
    await made.ask(SERVED)
    await made.until("suspended")
    return made


async def test_it_is_refused_by_name_until_it_has_paid(dunned: Dunned) -> None:
    refused = await dunned.ask(402)
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("billing_error", "organization_suspended")
    assert "TG-000001 has not been paid" in error["message"]
    assert refused.headers["x-should-retry"] == "false"
    assert (await dunned.world.call("GET", "/v1/models", key=dunned.world.api_key)).is_success
    for amount, expected in (("9", 402), ("1", SERVED)):
        body = {"amount": amount, "reference": "wire 7"}
        assert (await dunned.world.call("POST", f"{dunned.path}/payments", body)).is_success
        await dunned.ask(expected)


async def test_an_operator_lifts_it_until_the_next_stage(dunned: Dunned, org_id: str) -> None:
    await dunned.ask(402)
    lifted = await dunned.world.call("POST", f"{ADMIN}/orgs/{org_id}/lift-suspension")
    assert lifted.status_code == 200 and lifted.json()["suspension_lifted_at"] is not None
    await dunned.ask(SERVED)
    await dunned.until("uncollectible")
    await dunned.ask(402)
    note = await dunned.world.call("POST", f"{dunned.path}/credit-notes", {"reason": "forgiven"})
    assert note.status_code == 201
    await dunned.ask(SERVED)


async def test_who_was_not_there_is_told_again(dunned: Dunned) -> None:
    told = list[datetime]()

    async def tell() -> None:
        told.append(dunned.now)

    elsewhere = Invoicer(
        dunned.world.db, wall_clock=lambda: dunned.now.timestamp(), on_suspension=tell
    )
    for minutes in (0, 4, 2):
        dunned.now += timedelta(minutes=minutes)
        await elsewhere.look()
    assert len(told) == 2, "five minutes later all have heard of it"
