"""Hard caps that have refused: noted where the limiter refuses, each told once in its period with
what is spent of it, whatever becomes of Postgres meanwhile."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest
import redis.asyncio
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from billing.alerts.alerts import select_alerts, to_alerts
from billing.ingestion.ingest import ingest
from gateway.limits import refused_caps
from gateway.limits.funding import Funding
from gateway.limits.refused_caps import MAX_NOTED, REPEAT_S, RefusedCaps
from gateway.limits.spending import MAX_NANO, Cap, Counter, counter_of
from gateway.principal import CapPeriod, CapScope, SpendCap
from tests.billing.alerts.test_alerts import archive, cap, spends
from tests.gateway.limits.money.money_books import ORG, BooksOfATest, who
from tests.gateway.limits.money.test_limiter_money import LimitedGateway
from tests.gateway.limits.money.test_limiter_money import cap as allows
from tests.gateway.limits.test_ceilings import NOWHERE, Clock

NOON = 1_795_089_600.0
"""2026-11-19 12:00:00 UTC."""
PICO = 1000


def refuses(nano: int, scope: CapScope = "org", owner: str = ORG, period: CapPeriod = "day") -> Cap:
    return Cap(counter_of(scope, owner, period, NOON), nano)


async def raised(db: AsyncEngine) -> list[tuple[str, int, int, str]]:
    async with db.connect() as conn:
        found = to_alerts(await conn.execute(select_alerts(ORG).order_by(sa.text("id"))))
    return [(each.cap_id, each.threshold, each.used, each.reason) for each in found]


async def test_each_refusing_cap_is_told_once_with_what_is_spent(db: AsyncEngine) -> None:
    day = await cap(db, 100 * PICO, hard=True)
    key = await cap(db, 90 * PICO, hard=True, key="k", period="total")
    soft = await cap(db, 90 * PICO, key="k", period="total")  # it refuses nothing
    await cap(db, 80 * PICO, org="org_b", hard=True)
    gateways = [RefusedCaps(db) for _ in range(3)]
    await ingest(db, [spends(49 * PICO)])
    assert {each[:2] for each in await raised(db)} == {(key, 50), (soft, 50)}
    for each in gateways:
        each.note(ORG, [refuses(100), refuses(90, "key", "k", "total")])
    await asyncio.gather(*(each.flush() for each in gateways))
    hundreds = [(day, 100, 49 * PICO, "refused"), (key, 100, 49 * PICO, "refused")]
    assert sorted((await raised(db))[2:]) == sorted(hundreds)
    await ingest(db, [spends(60 * PICO)])
    after = [each for each in await raised(db) if each[0] == day]
    assert [each[1:] for each in after] == [
        (100, 49 * PICO, "refused"), (50, 109 * PICO, "spent"), (80, 109 * PICO, "spent"),
    ]  # fmt: skip


async def test_what_is_spent_whole_is_said_to_be(db: AsyncEngine) -> None:
    """Known to the books only in the hour's sum: there was no cap yet."""
    await ingest(db, [spends(120 * PICO)])
    whole = await cap(db, 100 * PICO, hard=True)
    none = await cap(db, 0, hard=True, period="total", project="proj_b")
    noting = RefusedCaps(db)
    noting.note(ORG, [refuses(100), refuses(0, "project", "proj_b", "total")])
    await noting.close()
    assert sorted(await raised(db)) == sorted(
        [(whole, 100, 120 * PICO, "spent"), (none, 100, 0, "refused")]
    )


async def test_a_cap_that_was_raised_since_has_not_refused_and_a_lower_one_has(
    db: AsyncEngine,
) -> None:
    await cap(db, 200 * PICO, hard=True, by_operator=True)
    lower = await cap(db, 50 * PICO, hard=True)
    noting = RefusedCaps(db)
    noting.note(ORG, [refuses(100)])
    await noting.flush()
    assert [each[:2] for each in await raised(db)] == [(lower, 100)]


async def test_a_new_cap_and_a_new_period_are_told_of_anew(db: AsyncEngine) -> None:
    clock = Clock()
    noting = RefusedCaps(db, clock=clock)
    first = await cap(db, 100 * PICO, hard=True)

    async def refuse(day: int) -> list[str]:
        start = datetime(2026, 11, day, tzinfo=UTC)
        counter = Counter("org", ORG, "day", start, datetime(2026, 11, day + 1, tzinfo=UTC))
        noting.note(ORG, [Cap(counter, 100)])
        await noting.flush()
        return [each[0] for each in await raised(db)]

    assert await refuse(19) == await refuse(19) == [first]
    assert await refuse(20) == [first, first]
    await archive(db, first)
    second = await cap(db, 100 * PICO, hard=True)
    assert len(await refuse(20)) == 2, "told a moment ago"
    clock.now += REPEAT_S
    assert await refuse(20) == [first, first, second]


async def test_what_postgres_does_not_take_is_kept_within_bounds(
    db: AsyncEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(refused_caps, "MAX_NOTED", 2)
    nowhere = create_async_engine(NOWHERE)
    noting = RefusedCaps(nowhere, interval_s=0.01)
    caps = {key: await cap(db, 100 * PICO, hard=True, key=key) for key in "abc"}
    noting.start()
    for key in "abca":
        noting.note(ORG, [refuses(100, "key", key)])
    async with asyncio.timeout(30):
        while "refusals of caps not written" not in caplog.text:
            await asyncio.sleep(0.01)
        noting._db = db
        while len(await raised(db)) < 2:
            await asyncio.sleep(0.01)
        noting.note(ORG, [refuses(100, "key", "c")])  # still refused later
        while len(await raised(db)) < 3:
            await asyncio.sleep(0.01)
    await noting.close()
    assert {each[0] for each in await raised(db)} == set(caps.values())
    assert MAX_NOTED > 1000
    await nowhere.dispose()


async def test_the_limiter_names_each_cap_that_has_too_little_left(
    redis: redis.asyncio.Redis,
) -> None:
    heard: list[tuple[str, list[tuple[str, int]]]] = []

    def on_refusal(org_id: str, caps: list[Cap]) -> None:
        heard.append((org_id, [(each.counter.scope, each.amount_nano) for each in caps]))

    desk = LimitedGateway(redis, BooksOfATest(), on_refusal=on_refusal)
    caller = who(allows(1000), allows(1200, "key", "key_a"), allows(10**6, period="month"))
    await desk.admitted(caller, 100, 0)  # 300 of each
    assert heard == []
    await desk.refused(caller, 290, 0)  # 870: 700 and 900 are left
    await desk.refused(caller, 310, 0)  # 930
    # 699 for the input, and 11 for a token of output
    await desk.refused(caller, 233, 10**6, given=False)
    assert heard == [
        (ORG, [("org", 1000)]),
        (ORG, [("org", 1000), ("key", 1200)]),
        (ORG, [("org", 1000)]),
    ]
    await desk.limiter.close()


class PaidInAdvance:
    """So much, in nano-USD."""

    def __init__(self, nano: int) -> None:
        self.nano = nano
        self.version = 0

    async def top_up(
        self, org_id: str, *, spent_nano: int, wanted_nano: int, released: int | None
    ) -> Funding:
        self.version += 1
        return Funding(
            version=self.version,
            funded_nano=self.nano,
            by_model={},
            ttl_s=60,
            refill_nano=0,
            must_shrink=False,
        )


async def test_a_cap_of_a_prepaid_org_is_named_by_itself_and_its_balance_is_not(
    redis: redis.asyncio.Redis,
) -> None:
    heard: list[list[tuple[str, int]]] = []

    def on_refusal(org_id: str, caps: list[Cap]) -> None:
        heard.append([(each.counter.scope, each.amount_nano) for each in caps])

    paid = PaidInAdvance(600)
    desk = LimitedGateway(redis, BooksOfATest(), on_refusal=on_refusal, lender=paid)
    balance = SpendCap("org", ORG, "total", MAX_NANO, is_funded=True)
    caller = who(balance, allows(1000, period="total"), allows(700, "key", "key_a"))
    refused = await desk.refused(caller, 210, 0)  # 630
    assert (refused.limit, heard) == (600, [[]]), "all that was paid is no cap"
    paid.nano = 2000
    desk.limiter.funds.has_changed((ORG, counter_of("org", ORG, "total", NOON).key(ORG)))
    await desk.admitted(caller, 210, 0)
    refused = await desk.refused(caller, 130, 0)  # 390: 370 and 70 are left
    assert (refused.limit, heard[1:]) == (700, [[("org", 1000), ("key", 700)]])
    await desk.limiter.close()
