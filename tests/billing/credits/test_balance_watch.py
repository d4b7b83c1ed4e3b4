"""A balance that crosses its thresholds: against a model of what was said, and in Postgres."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import msgspec
import pytest
import sqlalchemy as sa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.alerts.alerts import select_alerts, to_alerts
from billing.credits.balance import balance_of
from billing.credits.balance_leases import LeaseRequest
from billing.credits.balance_watch import (
    DREGS_PICO,
    AutoTopUp,
    BalanceSettings,
    NoticeState,
    clear_top_up,
    find_crossing,
    set_settings,
)
from billing.credits.grants_admin import grant_credit, revoke_credit
from billing.credits.lines import settle, sweep, top_up
from billing.credits.top_ups import end_top_up, mark_dispatched, to_top_up, top_ups_of, undispatched
from billing.events import Price, Quantities
from billing.ingestion.ingest import ingest
from billing.money import PICO_PER_USD
from billing.tables import credit_grants, top_ups
from tests.billing.corrections.test_rerating import anew
from tests.billing.invoices.billed import at
from tests.billing.samples import an_attempt, an_event
from tests.budget import examples

ORG = "org_a"
CENT = PICO_PER_USD // 100
LOW, BELOW = 50 * CENT, 30 * CENT
cents = st.integers(0, 80).map(lambda number: number * CENT)


class Machine(RuleBasedStateMachine):
    """A balance that falls by itself and rises by credits and by what is returned, looked at at any
    time."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.told = 100 * CENT, NoticeState()
        self.wanted = BalanceSettings(
            low_pico=LOW,
            top_up=AutoTopUp(amount_pico=CENT, below_pico=BELOW, max_per_day=1),
        )
        self.unsaid = dict.fromkeys(("low", "exhausted", "top_up"), True)
        """Since a credit has lifted the balance above, or anything has for a top-up, nobody was
        told."""

    def look(self, *, was_refused: bool = False, rearms: bool = False) -> None:
        crossed = find_crossing(
            self.told, self.wanted, self.left, was_refused=was_refused, rearms=rearms
        )
        self.told = crossed.after
        is_dry = self.left <= 0 or (was_refused and self.left < DREGS_PICO)
        assert crossed.is_low == (self.unsaid["low"] and self.left <= LOW)
        assert crossed.is_exhausted == (self.unsaid["exhausted"] and is_dry)
        assert crossed.wants_top_up == (self.unsaid["top_up"] and self.left <= BELOW)
        self.unsaid["low"] &= not crossed.is_low
        self.unsaid["exhausted"] &= not crossed.is_exhausted
        if crossed.wants_top_up:
            self.told = msgspec.structs.replace(self.told, top_up_id="topup_1")
            self.unsaid["top_up"] = False

    @rule(by=cents)
    def is_spent(self, by: int) -> None:
        self.left -= by

    @rule()
    def is_looked_at(self) -> None:
        self.look()

    @rule()
    def has_refused(self) -> None:
        self.look(was_refused=True)

    @rule(amount=cents)
    def is_credited(self, amount: int) -> None:
        dry_at = self.told.dry_at_pico
        self.left += amount
        self.unsaid["low"] |= self.left > LOW
        self.unsaid["top_up"] |= self.left > BELOW
        self.unsaid["exhausted"] |= dry_at is not None and self.left > max(dry_at, 0)
        self.look(rearms=True)

    @rule(amount=cents)
    def is_returned(self, amount: int) -> None:
        self.left += amount
        self.unsaid["top_up"] |= self.left > BELOW
        self.look()

    @precondition(lambda self: self.told.top_up_id is not None)
    @rule()
    def is_answered(self) -> None:
        self.told = msgspec.structs.replace(self.told, top_up_id=None)
        self.unsaid["top_up"] = True

    @invariant()
    def what_was_told_says_no_more_than_that(self) -> None:
        assert (self.told.top_up_id is None) == self.unsaid["top_up"]
        assert (self.told.dry_at_pico is None) == self.unsaid["exhausted"]


TestWatch = Machine.TestCase
TestWatch.settings = settings(
    max_examples=examples(100), stateful_step_count=25, deadline=None, database=None
)


def test_who_is_refused_with_much_left_has_asked_for_too_much() -> None:
    left = DREGS_PICO
    assert not find_crossing(
        NoticeState(), BalanceSettings(), left, was_refused=True, rearms=False
    ).is_exhausted
    assert find_crossing(
        NoticeState(), BalanceSettings(), left - 1, was_refused=True, rearms=False
    ).is_exhausted


async def credit(db: AsyncEngine, name: str, number: int) -> None:
    async with db.begin() as conn:
        await grant_credit(conn, credit_id=name, org=ORG, amount_pico=number * CENT)


async def wants(db: AsyncEngine, **fields: object) -> None:
    async with db.begin() as conn:
        await set_settings(conn, ORG, BalanceSettings(**fields))  # type: ignore[arg-type]


async def spend(db: AsyncEngine, number: int) -> None:
    prices = {"output": Price("one", CENT)}
    attempt = an_attempt(org=ORG, prices=prices)
    await ingest(db, [an_event(attempt, Quantities(output=number))])
    await sweep(db)


async def said(db: AsyncEngine) -> list[tuple[str, int, str]]:
    """Return what alerts say is left, in cents, and why; of one millisecond in the order of what
    runs out, as chance orders their ids."""
    async with db.connect() as conn:
        found = to_alerts(await conn.execute(select_alerts(ORG)))
    millisecond = len("alert_") + 12
    found.sort(key=lambda it: (it.id[:millisecond], it.measure == "credits_exhausted", it.id))
    return [(it.measure.removeprefix("credits_"), it.used // CENT, it.reason) for it in found]


async def asked(db: AsyncEngine) -> list[str]:
    async with db.connect() as conn:
        found = await conn.execute(top_ups_of(ORG).order_by(top_ups.c.id))
        return [to_top_up(row).state for row in found]


async def test_each_crossing_is_told_once_whoever_looks_and_again_after_a_credit(
    db: AsyncEngine,
) -> None:
    await wants(db, low_pico=LOW)
    await credit(db, "one", 100)
    await spend(db, 49)
    assert await said(db) == []
    await spend(db, 1)
    await asyncio.gather(*(settle(db, ORG) for _ in range(4)))
    await spend(db, 10)
    assert await said(db) == [("low", 50, "spent")]
    await spend(db, 40)
    await spend(db, 3)
    assert (await said(db))[1:] == [("exhausted", 0, "spent")]
    await credit(db, "small", 2)
    await spend(db, 1)
    assert len(await said(db)) == 2, "it was not above either"
    await credit(db, "two", 60)
    await spend(db, 10)
    assert (await said(db))[2:] == [("low", 48, "spent")]
    async with db.begin() as conn:
        await revoke_credit(conn, ORG, "two")
    assert (await said(db))[3:] == [("exhausted", 0, "spent")], "taken back is as good as spent"


async def test_a_request_for_which_too_little_is_left_finds_the_balance_exhausted(
    db: AsyncEngine,
) -> None:
    await credit(db, "one", 9)
    await top_up(db, ORG, LeaseRequest(spent_pico=0, wanted_pico=9 * CENT))
    assert await said(db) == []
    for _ in range(3):
        await top_up(db, ORG, LeaseRequest(spent_pico=5 * CENT, wanted_pico=5 * CENT))
    assert await said(db) == [("exhausted", 9, "refused")]
    await credit(db, "two", 1)
    await top_up(db, ORG, LeaseRequest(spent_pico=5 * CENT, wanted_pico=50 * CENT))
    assert len(await said(db)) == 1, "ten cents are left, of which too much was asked"


async def fail(db: AsyncEngine) -> None:
    """The top-up that is open."""
    async with db.begin() as conn:
        found = await conn.execute(top_ups_of(ORG).where(top_ups.c.state == "requested"))
        await end_top_up(conn, to_top_up(found.one()).id, "failed", failure="card declined")


async def test_a_top_up_is_asked_for_once_a_crossing_and_no_more_often_than_it_may(
    db: AsyncEngine,
) -> None:
    await credit(db, "one", 100)
    await spend(db, 80)
    await wants(db, top_up=AutoTopUp(amount_pico=CENT, below_pico=BELOW, max_per_day=2))
    assert await asked(db) == ["requested"], "said at once of what is below already"
    await spend(db, 10)
    assert await asked(db) == ["requested"]
    await fail(db)
    await credit(db, "two", 100)
    await spend(db, 90)
    assert await asked(db) == ["failed", "requested"], "it was above meanwhile"
    await fail(db)
    await credit(db, "three", 100)
    await spend(db, 100)
    assert len(await asked(db)) == 2, "twice a day"
    async with db.begin() as conn:
        old = sa.update(top_ups).values(requested_at=top_ups.c.requested_at - timedelta(days=1))
        await conn.execute(old)
    await settle(db, ORG)
    assert len(await asked(db)) == 3, "a day later it may"
    await settle(db, ORG)
    assert len(await asked(db)) == 3


async def test_what_a_re_rating_returns_asks_for_no_second_top_up_and_repeats_no_alert(
    db: AsyncEngine,
) -> None:
    await credit(db, "one", 100)
    wish = AutoTopUp(amount_pico=CENT, below_pico=BELOW, max_per_day=9)
    await wants(db, low_pico=LOW, top_up=wish)
    was = an_attempt(
        org=ORG, prices={"output": Price("one", CENT)}, admitted_at=at(2026, 9, 10).timestamp()
    )
    await ingest(db, [an_event(was, Quantities(output=80))])
    await sweep(db)
    told = [("low", 20, "spent")]
    assert (await asked(db), await said(db)) == (["requested"], told)
    await anew(db, {"output": Price("two", CENT // 2)})
    async with db.connect() as conn:
        assert (await balance_of(conn, ORG)).left_pico == 60 * CENT, "above both"
    await spend(db, 40)
    assert (await asked(db), await said(db)) == (["requested"], told)
    await fail(db)
    await credit(db, "two", 40)
    await spend(db, 40)
    assert await asked(db) == ["failed", "requested"]
    assert await said(db) == [*told, *told], "a credit has lifted it above"


async def test_one_that_is_granted_may_be_followed_and_one_that_is_late_expires(
    db: AsyncEngine,
) -> None:
    await credit(db, "one", 20)
    await wants(db, top_up=AutoTopUp(amount_pico=CENT, below_pico=BELOW, max_per_day=9))
    async with db.begin() as conn:
        (first,) = await undispatched(conn, 10)
        await mark_dispatched(conn, [first.id])
        assert await undispatched(conn, 10) == []
        await end_top_up(conn, first.id, "granted", credit_id="credit_1")
        await clear_top_up(conn, ORG, first.id)
        await grant_credit(conn, credit_id="credit_1", org=ORG, amount_pico=first.amount_pico)
    assert await asked(db) == ["granted", "requested"], "it is still below"
    async with db.begin() as conn:
        told = {(each.id == first.id, each.state) for each in await undispatched(conn, 10)}
        assert told == {(True, "granted"), (False, "requested")}
        await conn.execute(sa.update(top_ups).values(expires_at=sa.func.now()))
    await sweep(db)
    assert await asked(db) == ["granted", "expired"]
    await settle(db, ORG)
    assert len(await asked(db)) == 2, "nobody answered: it waits until it was above"
    await wants(db)
    await wants(db, top_up=AutoTopUp(amount_pico=CENT, below_pico=BELOW, max_per_day=9))
    assert await asked(db) == ["granted", "expired", "requested"], "off and on"


async def test_a_credit_that_expires_is_noticed_when_nobody_asks(db: AsyncEngine) -> None:
    await wants(db, low_pico=LOW)
    await credit(db, "stays", 20)
    await credit(db, "goes", 80)
    assert await sweep(db) == 0
    before = await said(db)
    assert before == [("low", 20, "spent")], "with the first one alone"
    async with db.begin() as conn:
        over = sa.update(credit_grants).where(credit_grants.c.id == "goes")
        await conn.execute(over.values(expires_at=sa.func.now()))
    assert await sweep(db) == 1
    assert await said(db) == [*before, ("low", 20, "spent")]
    assert await sweep(db) == 0, "once"


@pytest.mark.parametrize("prepaid", [True, False])
async def test_who_gets_an_invoice_is_not_told(db: AsyncEngine, prepaid: bool) -> None:
    async with db.begin() as conn:
        made = "INSERT INTO orgs (id, name, prepaid) VALUES (:id, 'a', :prepaid)"
        await conn.execute(sa.text(made), {"id": ORG, "prepaid": prepaid})
    await wants(db, low_pico=LOW)
    await credit(db, "one", 60)
    await spend(db, 70)
    expected = [("low", -10, "spent"), ("exhausted", -10, "spent")] if prepaid else []
    assert await said(db) == expected
    async with db.connect() as conn:
        assert (await balance_of(conn, ORG)).left_pico == (-10 * CENT if prepaid else 0)
