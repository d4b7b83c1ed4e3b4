"""Gateways, shippers, who invoices and Postgres, killed at random while usage flows and months end;
and what books and invoices say then.

    python -m tests.chaos.metering [--kills 1000] [--seed 1] [--sync group|before_answer]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from typing import Any, get_args

import msgspec
import psutil
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.currency import USD
from billing.events import COMPONENTS, Quantities
from billing.ingestion.shipper import Alarms, adopt
from billing.invoices.accounts import add_rate, set_account
from billing.invoices.invoicer import Invoicer
from billing.pricing.rating import rate
from billing.reconciliation.checks import check_invoices, check_ledger
from billing.spool.sync_policy import SyncPolicy
from billing.tables import AMOUNTS, EPOCH, to_moment
from gateway.db import create_engine
from gateway.home import Home
from gateway.processes import embedded_databases as embedded
from gateway.processes.child_processes import Child
from migrations.runner import migrate
from tests.chaos.metered import (
    ACCOUNTS,
    DAYS_A_KILL,
    GATEWAYS,
    INVOICERS,
    PRICES,
    SHIPPERS,
    Plan,
    Site,
    run_process,
)
from tests.scratch import make_scratch

POSTGRES = "postgres"
VICTIMS = (*GATEWAYS, *GATEWAYS, *SHIPPERS, *INVOICERS, POSTGRES, POSTGRES)
BETWEEN_KILLS_S = (0.05, 0.2)
PROGRESS_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
LONG_ENOUGH = timedelta(days=70)
"""After the last event its period has ended, and so has its grace."""
PRELOADED = ["tests.chaos.metered", "psutil", "migrations.runner"]


class Arena:
    """A site with its processes, which come back as often as they are killed."""

    def __init__(self, site: Site, rng: random.Random) -> None:
        self.site, self._rng = site, rng
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._processes: dict[str, ForkServerProcess] = {}
        self._postgres: Child
        self.killed: Counter[str] = Counter()

    async def start(self) -> None:
        await self.start_postgres()
        await migrate(self.site.database_url)
        await self._open_accounts()
        for name in (*GATEWAYS, *SHIPPERS, *INVOICERS):
            self._begin(name)

    async def start_postgres(self) -> None:
        """Start no more than the books, of which all was used already."""
        self._postgres = await embedded.start_postgres(self.site.home)

    async def _open_accounts(self) -> None:
        db = create_engine(self.site.database_url)
        async with db.begin() as conn:
            for org_id, terms in ACCOUNTS.items():
                known = sa.text("INSERT INTO orgs (id, name) VALUES (:org, :org)")
                await conn.execute(known, {"org": org_id})
                now = to_moment(self.site.now())
                await set_account(conn, org_id=org_id, terms=terms, now=now)
            for currency in {terms.currency for terms in ACCOUNTS.values()} - {USD}:
                await add_rate(
                    conn, currency=currency, usd_per_unit="0.0066", valid_from=EPOCH, source="here"
                )
        await db.dispose()

    def _begin(self, name: str) -> None:
        process = self._context.Process(target=run_process, args=(self.site, name), daemon=True)
        process.start()
        self._processes[name] = process

    async def kill(self, victim: str) -> None:
        """kill -9, and begin again."""
        self.site.pass_days(DAYS_A_KILL)
        self.killed[victim] += 1
        if victim != POSTGRES:
            self._processes[victim].kill()
            await asyncio.to_thread(self._processes[victim].join)
            self._begin(victim)
        elif self._rng.random() < 0.5:
            self._postgres.send_signal(signal.SIGKILL)
            await self._postgres.wait()
        else:
            # It recovers by itself, unless that was the process that does.
            for child in psutil.Process(self._postgres.pid).children()[-1:]:
                child.kill()
        if self._postgres.poll() is not None:
            self._postgres = await self._postgres_again()

    async def _postgres_again(self) -> Child:
        """Start it again: what the dead one's children still hold keeps the next from starting for
        a moment."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while True:
            try:
                return await embedded.start_postgres(self.site.home)
            except embedded.EmbeddedError:
                if time.monotonic() > deadline:
                    raise

    async def kill_many(self, kills: int) -> None:
        for _ in range(kills):
            await self.progress()
            await asyncio.sleep(self._rng.uniform(*BETWEEN_KILLS_S))
            await self.kill(self._rng.choice(VICTIMS))
        await self.progress()

    async def until_late(self) -> None:
        """Until a gateway whose clock is behind has answered in a period that is invoiced."""
        behind = to_moment(min(self.site.now(name) for name in GATEWAYS))
        invoiced = sa.text("SELECT 1 FROM invoices WHERE period_end > :behind LIMIT 1")
        db = create_engine(self.site.database_url)
        try:
            async with asyncio.timeout(PROGRESS_TIMEOUT_S), db.connect() as conn:
                while await conn.scalar(invoiced, {"behind": behind}) is None:
                    await asyncio.sleep(0.05)
        finally:
            await db.dispose()
        await self.progress()

    async def progress(self) -> None:
        """Until every gateway has answered since: what is killed does something."""
        deadline = time.monotonic() + PROGRESS_TIMEOUT_S
        for name in GATEWAYS:
            path = self.site.journal(name)
            before = path.stat().st_size if path.exists() else 0
            while not path.exists() or path.stat().st_size <= before:
                assert time.monotonic() < deadline, f"{name} answers nobody"
                await asyncio.sleep(0.01)

    async def finish(self) -> None:
        """Everybody leaves, what lies in the spools is shipped, and all that was used is
        invoiced."""
        for process in self._processes.values():
            process.terminate()
        for name, process in self._processes.items():
            await asyncio.to_thread(process.join, STOP_TIMEOUT_S)
            # One that had just begun again knew no signal yet.
            assert process.exitcode in (0, -signal.SIGTERM), f"{name}: {process.exitcode}"
        db = create_engine(self.site.database_url)
        await until_it_answers(db)
        for lock in sorted(self.site.home.spool.glob("*/lock")):
            await adopt(db, lock.parent, Alarms(), lambda events: None)
        later = self.site.now() + LONG_ENOUGH.total_seconds()
        await Invoicer(db, wall_clock=lambda: later).look()
        await db.dispose()

    async def clean_up(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()
        await self._postgres.stop(embedded.STOP_TIMEOUT_S)


async def until_it_answers(db: AsyncEngine) -> None:
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while True:
        try:
            return await (await db.connect()).close()
        except Exception:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)


# The one who looks at the books.


class Verdict(msgspec.Struct, kw_only=True):
    answered: int = 0
    recovered: int = 0
    invoices: int = 0
    late: int = 0
    """Lines of invoices, of what came when its period had been invoiced."""
    killed: dict[str, int] = {}
    lost: list[str] = []
    """Answered, and not in the books."""
    phantom: list[str] = []
    """In the books, and nobody asked for it, or not for that."""
    wrong: list[str] = []
    """Sums that differ, and what `tollgate reconcile` says."""

    @property
    def sound(self) -> bool:
        return not (self.lost or self.phantom or self.wrong)


SUMS = {
    "ledger": """
        SELECT substr(debit, 12), sum(amount_pico) FROM transfers WHERE kind = 'usage' GROUP BY 1
    """,
    "balances": """
        SELECT substr(account, 12), debits_pico - credits_pico + (
            SELECT coalesce(sum(residual_pico), 0) FROM invoices WHERE account LIKE '%:' || org_id)
        FROM balances WHERE account LIKE 'receivable:%'
    """,
    "rollups": f"SELECT org, sum({' + '.join(AMOUNTS)}) FROM usage_hourly GROUP BY 1",
    "lines of invoices": "SELECT org_id, sum(exact_pico) FROM invoice_lines GROUP BY 1",
    "final invoices": """
        SELECT org_id, sum(total_coins * coin_pico + residual_pico) FROM invoices
        WHERE state <> 'draft' GROUP BY 1
    """,
}
"""Five sums that must agree on what each org owes; the balance is taken without the rounding of
invoices."""
INVOICED = "SELECT org_id, model, component, sum(quantity) FROM invoice_lines GROUP BY 1, 2, 3"
LATE = "SELECT count(*) FROM invoice_lines WHERE kind = 'late'"
FINAL = "SELECT count(*) FROM invoices WHERE state <> 'draft'"
Rows = Sequence[sa.Row[Any]]


async def judge(site: Site) -> Verdict:
    texts = [site.journal(name).read_text() for name in GATEWAYS]
    lines = [line.split() for text in texts for line in text.splitlines()]
    asked = {attempt_id for verb, attempt_id in lines if verb == "asked"}
    answered = {attempt_id for verb, attempt_id in lines if verb == "answered"}
    db = create_engine(site.database_url)
    async with db.connect() as connection:
        rows = (await connection.execute(sa.text("SELECT * FROM usage_events"))).all()
        wrong = await differences(connection, rows)
        conflicts = await connection.scalars(sa.text("SELECT event_id FROM usage_conflicts"))
        wrong += [f"{event_id} came with other content" for event_id in conflicts]
        counts = [await connection.scalar(sa.text(query)) for query in (FINAL, LATE)]
    wrong += await check_ledger(db) + await check_invoices(db)
    await db.dispose()
    return Verdict(
        answered=len(answered),
        recovered=sum(row.finish == "recovered" for row in rows),
        invoices=counts[0],
        late=counts[1],
        lost=sorted(answered - {row.id for row in rows}),
        phantom=[row.id for row in rows if row.id not in asked or not is_due(row, answered)],
        wrong=wrong,
    )


async def differences(connection: AsyncConnection, rows: Rows) -> list[str]:
    """Between what the events come to, one by one, and what is said of them together."""
    owed: Counter[str] = Counter()
    used: Counter[tuple[str, str, str]] = Counter()
    for row in rows:
        quantities = quantities_of(row)
        owed[row.org] += rate(quantities, PRICES).amount_pico
        used.update({(row.org, row.model, it): getattr(quantities, it) for it in COMPONENTS})
    wrong = []
    for what, query in SUMS.items():
        found = {org: int(sum_) for org, sum_ in await connection.execute(sa.text(query)) if sum_}
        if found != +owed:
            wrong.append(f"{what}: {found} instead of {dict(+owed)}")
    invoiced = {
        (org, model, component): int(quantity)
        for org, model, component, quantity in await connection.execute(sa.text(INVOICED))
    }
    if invoiced != +used:
        wrong.append(f"tokens on invoices: {invoiced} instead of {dict(+used)}")
    return wrong


def quantities_of(row: sa.Row[Any]) -> Quantities:
    return Quantities(**{name: row._mapping[name] for name in COMPONENTS})


def is_due(row: sa.Row[Any], answered: set[str]) -> bool:
    """Whether the attempt may be billed so; one that was answered only as it was answered."""
    plan, used = Plan(row.id), quantities_of(row)
    if row.id in answered and row.finish != "done":
        return False
    return (row.org, row.model) == (plan.org, plan.model) and plan.allows(row.finish, used)


async def run(
    kills: int,
    *,
    seed: int,
    saves_early: bool = False,
    until_late: bool = False,
    sync: SyncPolicy | None = None,
) -> Verdict:
    """Kill so often, let everything come to rest, and judge. until_late: there must be usage that
    came too late for its invoice, however few kills there are. sync: of all spools; None: one of
    the gateways has each policy."""
    folder = make_scratch()
    site = Site(Home(folder), saves_early, sync)
    site.home.create()
    site.pass_days(0)
    arena = Arena(site, random.Random(seed))
    try:
        await arena.start()
        try:
            await arena.kill_many(kills)
            if until_late:
                await arena.until_late()
            await arena.finish()
            verdict = await judge(site)
        finally:
            await arena.clean_up()
    finally:
        shutil.rmtree(folder)
    verdict.killed = dict(arena.killed)
    return verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sync", choices=get_args(SyncPolicy), help="of all spools")
    options = parser.parse_args()
    began_s = time.monotonic()
    verdict = asyncio.run(run(options.kills, seed=options.seed, sync=options.sync))
    print(msgspec.json.format(msgspec.json.encode(verdict), indent=2).decode())
    print(f"{options.kills} kills in {time.monotonic() - began_s:.0f} s")
    sys.exit(0 if verdict.sound else 1)


if __name__ == "__main__":
    main()
