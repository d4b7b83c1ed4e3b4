"""/v1/admin/credits: what an org has paid in advance, and that a prepaid one spends no more."""

from __future__ import annotations

import time

import msgspec
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.corrections.rerating import ReratingScope, apply, plan
from billing.events import COMPONENTS, Quantities
from billing.ingestion.ingest import ingest
from billing.invoices.postings import Posting, post
from billing.money import PICO_PER_USD
from billing.reconciliation.checks import check_ledger
from gateway.audit.log import COMMAND_LINE
from gateway.ids import uuid7
from gateway.limits.outcomes import Admission, Refusal, Units
from gateway.principal import SpendCap
from gateway.tenancy.errors import InvalidField
from gateway.tenancy.money.credits import create_credit
from gateway.tenancy.money.spend_caps import MAX_AMOUNT_PICO, PICO_PER_NANO
from gateway.wire.admin.billing.credits import Components
from tests.billing.corrections.test_rerating import a_book
from tests.billing.invoices.billed import at, book, priced, tokens
from tests.billing.samples import PRICES, an_attempt, an_event, pay_usage
from tests.gateway.routes.admin.billing.test_admin_spend_caps import told
from tests.gateway.routes.admin.changing import ADMIN, ORG, Maker
from tests.gateway.routes.admin.conftest import World

CREDITS, BALANCE = f"{ADMIN}/credits", f"{ADMIN}/balance"
START = int(at(2026, 9, 10).timestamp())


async def spend(db: AsyncEngine, org_id: str, output: int) -> None:
    attempt = an_attempt(org=org_id, admitted_at=time.time())
    await ingest(db, [an_event(attempt, Quantities(output=output))])


async def test_a_prepaid_org_spends_what_it_was_credited_and_no_more(
    world: World, org_id: str
) -> None:
    """A token of output costs 400 nano; 25,000 of them a cent."""
    authenticate, limiter = (
        world.services.authenticator.authenticate,
        world.services.generation.limiter,
    )
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
    await world.services.redis.flushdb()
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
    assert await check_ledger(world.db) == []


async def shown(world: World, *names: str) -> list[str]:
    found = (await world.call("GET", BALANCE)).json()
    return [found[f"{name}_usd"] for name in names]


async def rate_anew(world: World, org_id: str, pico: int) -> None:
    span = ReratingScope(org_id=org_id, start=at(2026, 9, 1), end=at(2026, 10, 1))
    tariff = a_book(priced(pico))
    shown = await plan(world.db, span, tariff)
    await apply(world.db, span, tariff, shown.digest)


async def test_what_is_spent_is_what_usage_costs_after_all(world: World, org_id: str) -> None:
    """There and back, and then half: the receivable's debits have all of them, and what invoices
    add."""
    await book(world.db, tokens(at(2026, 9, 10), 1000, 2_000_000, org=org_id))
    assert await shown(world, "spent", "unpaid") == ["0.002", "0.002"]
    for pico, cost in ((3_000_000, "0.003"), (2_000_000, "0.002"), (1_000_000, "0.001")):
        await rate_anew(world, org_id, pico)
        assert await shown(world, "spent", "unpaid") == [cost, cost]
    terms = [
        Posting(id="inv.1", kind="adjustment", charged_pico=20 * PICO_PER_USD),
        Posting(id="inv.2", kind="rounding", charged_pico=-1_000_000),
    ]
    async with world.db.begin() as conn:
        await post(conn, org_id=org_id, postings=terms, now=at(2026, 10, 1))
    assert await shown(world, "spent", "unpaid") == ["0.001", "20.000999"]
    costs = await world.call("GET", f"{ORG}/costs?start_time={START}&end_time={START + 86400}")
    [bucket] = costs.json()["data"]
    assert bucket["results"][0]["amount"]["value"] == 0.001


async def test_what_is_unpaid_is_owed_and_what_is_given_back_is_shown(
    world: World, org_id: str
) -> None:
    names = ("spent", "paid_by_credits", "unpaid", "unapplied")
    credit = {"org_id": org_id, "amount_usd": "30", "models": ["penny"]}
    assert (await world.call("POST", CREDITS, credit)).is_success
    book_of = [tokens(at(2026, 9, 10), 1000, 10**10, org=org_id, model="far")]
    book_of.append(tokens(at(2026, 9, 10), 200, 10**10, org=org_id, model="penny"))
    await book(world.db, *book_of)
    await pay_usage(world.db, org_id)
    assert await shown(world, *names) == ["12", "2", "10", "2"], "no credit is for the rest"
    path = await Maker(world, org_id, "proj_a").draft()
    final = await world.call("POST", f"{path}/finalize")
    assert (final.json()["total"], final.json()["due"]) == ("12.00", "10.00")
    assert await shown(world, *names) == ["12", "2", "10", "0"]
    body = {"amount": "9.97", "reference": "wire 7"}
    assert (await world.call("POST", f"{path}/payments", body)).is_success
    assert await shown(world, *names) == ["12", "2", "0.03", "0"]
    assert (await world.call("POST", f"{path}/credit-notes", {"reason": "slow"})).is_success
    assert await shown(world, *names) == ["12", "2", "-11.97", "11.97"]
    await book(world.db, tokens(at(2026, 10, 5), 500, 10**10, org=org_id, model="far"))
    assert await shown(world, *names) == ["17", "2", "-6.97", "11.97"]
    again = await Maker(world, org_id, "proj_a").draft()
    assert (await world.call("POST", f"{again}/finalize")).json()["due"] == "0.00"
    assert await shown(world, *names) == ["17", "2", "-6.97", "6.97"]


async def test_operators_alone_give_credit_and_see_that_of_others(world: World) -> None:
    made = await world.call("POST", f"{ADMIN}/orgs", {"name": f"tenant-{uuid7().hex}"})
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


async def test_a_credit_for_a_model_that_nobody_serves_is_refused(
    world: World, org_id: str
) -> None:
    credit = {"org_id": org_id, "amount_usd": "5", "models": ["penny", "peny"]}
    refused = await world.call("POST", CREDITS, credit)
    assert (refused.status_code, refused.json()["param"]) == (400, "models[1]")
    assert await shown(world, "left") == ["0"]


def test_a_credit_names_each_component_once_at_most() -> None:
    every = [*COMPONENTS]
    assert msgspec.convert(every, Components) == every
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert([*every, every[0]], Components)
