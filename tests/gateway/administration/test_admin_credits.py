"""/v1/admin/credits: what an org has paid in advance, and that a prepaid one spends no more."""

from __future__ import annotations

import time

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.events import Quantities
from billing.ingest import ingest
from billing.ledger import check
from gateway.audit.log import COMMAND_LINE
from gateway.limits.limiter import Admission, Refusal
from gateway.limits.verdicts import Units
from gateway.principal import SpendCap
from gateway.tenancy.credits import create_credit
from gateway.tenancy.errors import InvalidField
from gateway.tenancy.spend_caps import MAX_AMOUNT_PICO, PICO_PER_NANO
from tests.billing.samples import PRICES, an_attempt, an_event
from tests.gateway.administration.changing import ADMIN
from tests.gateway.administration.conftest import World
from tests.gateway.administration.test_admin_spend_caps import told

CREDITS, BALANCE = f"{ADMIN}/credits", f"{ADMIN}/balance"


async def spend(db: AsyncEngine, org_id: str, output: int) -> None:
    attempt = an_attempt(org=org_id, admitted_at=time.time())
    await ingest(db, [an_event(attempt, Quantities(output=output))])


async def test_a_prepaid_org_spends_what_it_was_credited_and_no_more(
    world: World, org_id: str
) -> None:
    """A token of output costs 400 nano; 25,000 of them a cent."""
    authenticate, limiter = world.services.authenticator.authenticate, world.services.desk.limiter
    assert (await authenticate(world.api_key)).spend_caps == ()
    made = await world.call("PATCH", f"{ADMIN}/orgs/{org_id}", {"prepaid": True})
    assert made.json()["prepaid"] is True

    most = MAX_AMOUNT_PICO // PICO_PER_NANO
    await told(world, SpendCap("org", org_id, "total", most, is_funded=True))

    async def ask(output: int, lease_id: str) -> Admission | Refusal:
        return await limiter.admit(
            await authenticate(world.api_key),
            "far",
            input_tokens=0,
            max_output_tokens=output,
            lease_id=lease_id,
            prices=PRICES,
        )

    assert isinstance(await ask(1, "none"), Refusal), "it has paid for nothing"
    for _ in range(2):
        body, key = {"org_id": org_id, "amount_usd": "0.01"}, {"idempotency_key": "payment-1"}
        credited = await world.call("POST", CREDITS, body, **key)
        assert credited.status_code == 201, credited.text
    first = await ask(20_000, "first")
    assert isinstance(first, Admission)
    assert isinstance(await ask(5_001, "second"), Refusal)
    await limiter.settle(first, Units(output_tokens=10_000, cost_nano=4_000_000))
    await spend(world.db, org_id, 10_000)
    await world.services.redis.flushall()
    assert isinstance(await ask(15_001, "third"), Refusal), "the books have what was spent"
    assert isinstance(await ask(15_000, "fourth"), Admission)
    shown = (await world.call("GET", BALANCE)).json()
    assert (shown["credited_usd"], shown["spent_usd"], shown["left_usd"]) == (
        "0.01",
        "0.004",
        "0.006",
    )
    (listed,) = (await world.call("GET", CREDITS)).json()["data"]
    assert listed["amount_usd"] == "0.01"
    assert await check(world.db) == []


async def test_operators_alone_give_credit_and_see_that_of_others(world: World) -> None:
    made = await world.call("POST", f"{ADMIN}/orgs", {"name": "tenant"})
    other, key = made.json()["organization"]["id"], made.json()["admin_key"]["value"]
    me = (await world.call("GET", BALANCE)).json()["org_id"]
    body = {"org_id": other, "amount_usd": "5"}
    assert (await world.call("POST", CREDITS, body, key=key)).status_code == 403
    made = await world.call("POST", CREDITS, body)
    assert made.status_code == 201
    mine = await world.call("POST", CREDITS, {"org_id": me, "amount_usd": "1"})
    credit, hidden = f"{CREDITS}/{made.json()['id']}", f"{CREDITS}/{mine.json()['id']}"
    assert (await world.call("GET", credit, key=key)).json()["left_usd"] == "5"
    assert (await world.call("GET", hidden, key=key)).status_code == 404
    assert (await world.call("POST", f"{credit}/revoke", key=key)).status_code == 403
    assert (await world.call("POST", f"{credit}/revoke")).status_code == 404, "not of this org"
    assert (await world.call("GET", BALANCE, key=key)).json()["left_usd"] == "5"
    assert (await world.call("GET", BALANCE)).json()["left_usd"] == "1"
    seen = await world.call("GET", f"{BALANCE}?org_id={other}")
    assert seen.json()["left_usd"] == "5"
    peeking = await world.call("GET", f"{BALANCE}?org_id={me}", key=key)
    assert peeking.status_code == 403
    for wrong in ({"amount_usd": "0"}, {"amount_usd": "9000000"}, {"amount_usd": "-1"}):
        refused = await world.call("POST", CREDITS, {"org_id": other, **wrong})
        assert refused.status_code == 400
    gone = await world.call("POST", CREDITS, {"org_id": "org_none", "amount_usd": "1"})
    assert gone.status_code == 404
    taken = await world.call("POST", f"{credit}/revoke?org_id={other}")
    assert taken.json()["revoked_at"] is not None
    assert (await world.call("GET", BALANCE, key=key)).json()["available_usd"] == "0"


async def test_nobody_is_credited_with_more_than_counters_count(world: World, org_id: str) -> None:
    for amount in (0, 999, MAX_AMOUNT_PICO + 1000):
        with pytest.raises(InvalidField):
            await create_credit(
                world.services.system_db,
                org_id=org_id,
                amount_pico=amount,
                operator_org=org_id,
                actor=COMMAND_LINE,
            )
