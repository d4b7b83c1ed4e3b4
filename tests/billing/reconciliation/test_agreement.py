"""Engines, spools and books that agree, and each way in which they can fail to."""

from __future__ import annotations

from pathlib import Path

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.events import Quantities
from billing.ingestion.ingest import ingest
from billing.ingestion.settle_late import post_waste, settle_late, settle_orphan
from billing.ingestion.shipper import Alarms, ship_batch
from billing.pricing.price_book import PriceBook
from billing.reconciliation.agreement import Agreement, EngineCount, Tokens, agree
from billing.spool.spool import Spool
from tests.billing.samples import NOON, an_attempt, an_event

AT_NOON = f"{int(NOON * 1000):012x}"
ALIVE, WASTED = (f"{AT_NOON[:8]}-{AT_NOON[8:]}-7000-8000-00000000000{n}" for n in (1, 2))
USED = Quantities(uncached_input=100, cache_read=16, output=20)
BILLED = Tokens(116, 20)


def count(
    acknowledged: Tokens = BILLED,
    *,
    recent: dict[str, Tokens] | None = None,
    opened: dict[str, Tokens] | None = None,
    is_lost: bool = False,
    since: float = NOON - 3600,
) -> EngineCount:
    return EngineCount(
        name="penny",
        models=frozenset({"penny", "penny-adapted"}),
        since=since,
        until=None,
        is_lost=is_lost,
        acknowledged=acknowledged,
        open=opened or {},
        recent=recent or {},
    )


async def agreement(db: AsyncEngine, spools: Path, *counts: EngineCount) -> Agreement:
    return await agree(db, spools, lambda: counts)


async def test_all_agree_on_what_was_billed_and_wasted(db: AsyncEngine, tmp_path: Path) -> None:
    await ingest(db, [an_event(an_attempt(ALIVE), USED)])
    await post_waste(db, ALIVE, msgspec.structs.replace(USED, output=25))
    await settle_orphan(
        db, WASTED, Quantities(output=7), model="penny", book=PriceBook.load(), wait_s=0
    )
    await ingest(db, [an_event(an_attempt(model="an upstream's"), USED)])
    recent = {ALIVE: Tokens(116, 25), WASTED: Tokens(0, 7)}
    whole = count(Tokens(116, 32), recent=recent)
    assert await agreement(db, tmp_path, whole) == Agreement()
    late = an_event(an_attempt(WASTED), Quantities(output=3), finish="recovered")
    await ingest(db, [late])
    await settle_late(db, [late])
    assert await agreement(db, tmp_path, whole) == Agreement(), "what was reversed counts once"


async def test_what_runs_is_between_two_counts(db: AsyncEngine, tmp_path: Path) -> None:
    await ingest(db, [an_event(an_attempt(ALIVE), USED)])
    counts = [count(Tokens(0, 0), opened={ALIVE: BILLED}), count(BILLED, opened={"b": Tokens(9)})]
    found = await agree(db, tmp_path, lambda: [counts.pop(0) if len(counts) > 1 else counts[0]])
    assert found == Agreement()


async def test_an_engine_that_counts_otherwise_is_named_with_the_first_request(
    db: AsyncEngine, tmp_path: Path
) -> None:
    await ingest(db, [an_event(an_attempt(ALIVE), USED), an_event(an_attempt(WASTED), USED)])
    recent = {ALIVE: BILLED, WASTED: Tokens(116, 21)}
    found = await agreement(db, tmp_path, count(Tokens(232, 41), recent=recent))
    assert found.problems == [
        "engine penny: 41 generated tokens, and 40 in the books and spools",
        f"request req_1, event {WASTED}: engine penny counts 116 + 21 tokens, the books 116 + 20",
    ]
    lost = await agreement(db, tmp_path, count(Tokens(116, 20), is_lost=True))
    assert lost.problems == [] and len(lost.unknown) == 2
    early = await agreement(db, tmp_path, count(Tokens(0, 0), since=NOON + 1))
    assert early == Agreement(), "what was before its time is not its own"


async def test_what_a_spool_alone_has_counts_and_what_it_shipped_has_to_be_there(
    db: AsyncEngine, tmp_path: Path
) -> None:
    spool = await Spool.open(tmp_path / "own")
    event = an_event(an_attempt(ALIVE), USED)
    await spool.close(event)
    waiting = await agreement(db, tmp_path, count(recent={ALIVE: BILLED}))
    assert waiting == Agreement(num_waiting=1)
    await ship_batch(db, spool, Alarms())
    await spool.close(an_event(an_attempt(WASTED), USED))
    assert (await agreement(db, tmp_path, count(Tokens(232, 40)))).num_waiting == 1
    lost = await spool.read_closed(10)
    await spool.commit(lost)  # and Postgres never had it
    found = await agreement(db, tmp_path)
    assert found.problems == [
        f"request req_1, event {WASTED}: its spool has shipped it, the books lack it"
    ]
    await spool.close(an_event(an_attempt(ALIVE), Quantities(output=1)))
    found = await agreement(db, tmp_path)
    assert f"event {ALIVE}: its spool and the books have other content" in found.problems[1]
    await spool.shutdown()


async def test_what_ledger_and_rollups_disagree_on_is_named(
    db: AsyncEngine, tmp_path: Path
) -> None:
    await ingest(db, [an_event(an_attempt(ALIVE), USED)])
    async with db.begin() as connection:
        await connection.execute(sa.text("ALTER TABLE transfers DISABLE TRIGGER USER"))
        await connection.execute(sa.text("UPDATE transfers SET amount_pico = amount_pico + 1"))
    problems = (await agreement(db, tmp_path, count())).problems
    assert (
        f"request req_1, event {ALIVE}: the event's amounts differ from its transfers" in problems
    )
    assert any("the hour's money differs" in problem for problem in problems)


async def test_what_an_engine_counts_beyond_a_damaged_record_is_unknown_once_it_is_resolved(
    db: AsyncEngine, tmp_path: Path
) -> None:
    attempt = an_attempt(ALIVE)
    spool = await Spool.open(tmp_path / "own")
    spool.attempt_opened(attempt)
    spool.checkpoint(ALIVE, msgspec.structs.replace(USED, output=5), False)
    await spool.close(an_event(attempt, USED))
    await spool.shutdown()
    [segment] = spool.directory.glob("*.log")
    segment.write_bytes(segment.read_bytes()[:-1] + b"?")
    whole = count(recent={ALIVE: BILLED})
    before = await agreement(db, tmp_path, whole)
    assert any("damaged spool record own/00000001.log" in it for it in before.problems)
    spool = await Spool.open(tmp_path / "own")
    await ship_batch(db, spool, Alarms())
    after = await agreement(db, tmp_path, whole)
    assert after.problems == [] and after.num_waiting == 0
    assert after.unknown == [
        "engine penny: 20 generated tokens, and 5 in the books and spools: 1 of its records in a "
        "spool were damaged",
        f"request req_1, event {ALIVE}: engine penny counts 116 + 20 tokens, the books 116 + 5: "
        "its record in a spool was damaged",
    ]
    await spool.shutdown()
