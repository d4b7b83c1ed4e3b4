"""The processes that `metering` kills: gateways as far as they meter, shippers without clients, and
the invoicer.

A gateway is here a spool, its shipper and clients whose attempts open, checkpoint and close; a
shipper adopts what dead gateways leave; an invoicer drafts and finalizes. What a client was told
stands in a journal, which outlives the kill. All is real but the tokens, of which there are as many
as follow from the attempt's id (`Plan`), so that every row of the books can be judged on its own,
and the calendar: two days pass with each kill, so that months end meanwhile, however slow it goes.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.events import COMPONENTS, Attempt, Price, Quantities, UsageEvent
from billing.ingestion import shipper as worker
from billing.ingestion.ingest import ingest
from billing.ingestion.settle_late import settle_late
from billing.ingestion.shipper import Alarms, OnBooked, Shipper
from billing.invoices.accounts import BillingTerms
from billing.invoices.invoicer import Invoicer
from billing.spool.spool import Spool
from billing.spool.sync_policy import SyncPolicy
from gateway.db import create_engine
from gateway.home import Home
from gateway.ids import uuid7
from gateway.processes import embedded_databases as embedded

GATEWAYS = ("gateway-0", "gateway-1")
SHIPPERS = ("shipper-0",)
INVOICERS = ("invoicer-0",)
CLIENTS = 12
"""Each gateway gets this many clients."""
THINK_S = 0.01
SEGMENT_BYTES = 60_000
PRICES = {
    name: Price(f"penny:{name}:1", 1_000_003 * (1 + 7 * n)) for n, name in enumerate(COMPONENTS)
}
BEGINNING = datetime(2024, 1, 30, tzinfo=UTC)
"""Soon before a leap day, and nights of 23 and 25 hours."""
DAY_S = 24 * 3600
DAYS_A_KILL = 2
DAYS_BEHIND = {"gateway-1": 20}
"""Days that a gateway's clock is behind: what it books comes too late for the month of its use."""
INVOICE_INTERVAL_S = 0.2
ACCOUNTS = {
    "org_0": BillingTerms(grace_hours=0),
    "org_1": BillingTerms(timezone="America/New_York", billing_day=31, grace_hours=0),
    "org_2": BillingTerms(
        timezone="Asia/Kathmandu", billing_day=15, grace_hours=24, currency="JPY"
    ),
    "org_3": BillingTerms(timezone="Pacific/Apia", issuer="HOUSE", grace_hours=48),
    "org_4": BillingTerms(timezone="America/Havana", billing_day=10, grace_hours=0, issuer="HOUSE"),
}


class Plan:
    """The fate of an attempt, decided by its id alone."""

    def __init__(self, attempt_id: str) -> None:
        rng = random.Random(attempt_id)
        self.org, self.model = rng.choice(list(ACCOUNTS)), f"m{rng.randrange(3)}"
        read = Quantities(uncached_input=rng.randrange(1, 900), cache_read=16 * rng.randrange(9))
        self.steps = [msgspec.structs.replace(read, output=n) for n in range(rng.randrange(4))]
        """Its checkpoints."""
        self.bill = msgspec.structs.replace(read, output=rng.randrange(3, 500))
        self.is_voided = rng.random() < 0.05

    def allows(self, finish: str, found: Quantities) -> bool:
        if finish == "done":
            return not self.is_voided and found == self.bill
        return finish == "recovered" and found in (Quantities(), *self.steps)


class Site(msgspec.Struct, frozen=True):
    """The place where the processes of one run meet."""

    home: Home
    saves_early: bool
    """The planted bug: the offset is saved before the commit."""
    sync: SyncPolicy | None = None
    """The policy of all spools; None: gateways take turns."""

    @property
    def database_url(self) -> str:
        return embedded.postgres_url(self.home)

    def policy(self, name: str) -> SyncPolicy:
        if self.sync is not None:
            return self.sync
        return "before_answer" if name == GATEWAYS[-1] else "group"

    def journal(self, name: str) -> Path:
        return self.home.logs / f"{name}.journal"

    @property
    def calendar(self) -> Path:
        """A byte for each day that has passed."""
        return self.home.logs / "calendar"

    def pass_days(self, days: int) -> None:
        with self.calendar.open("ab") as file:
            file.write(bytes(days))

    def now(self, name: str = "") -> float:
        """As a process has it, in Unix seconds: of the day by the calendar, of the hour by ours."""
        days = self.calendar.stat().st_size - DAYS_BEHIND.get(name, 0)
        return BEGINNING.timestamp() + days * DAY_S + time.time() % DAY_S


def run_process(site: Site, name: str) -> None:
    """The life of one, until it is killed or told to stop."""
    logging.disable(logging.WARNING)  # of outages there are many
    worker.GATHER_S, worker.MAX_BACKOFF_S, worker.ADOPT_INTERVAL_S = 0.02, 0.2, 0.05
    if site.saves_early:
        worker.ship_batch = ship_early
    try:
        asyncio.run(invoice(site) if name in INVOICERS else live(site, name))
    except Exception as error:
        print(f"{name}: {error!r}", file=sys.stderr, flush=True)
        raise


async def live(site: Site, name: str) -> None:
    stop = told_to_stop()
    db = create_engine(site.database_url)
    folder = site.home.spool / name
    spool = await Spool.open(folder, policy=site.policy(name), segment_bytes=SEGMENT_BYTES)
    adopts = site.home.spool if name in SHIPPERS else None
    shipper = Shipper(spool, db, adopt_from=adopts)
    shipper.start()
    journal = os.open(site.journal(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    clients = CLIENTS if name in GATEWAYS else 0
    clock = partial(site.now, name)
    use = [asyncio.create_task(be_client(clock, spool, journal, stop)) for _ in range(clients)]
    await until_stopped(stop)
    await asyncio.gather(*use)
    await shipper.stop()
    await spool.shutdown()
    await db.dispose()


async def invoice(site: Site) -> None:
    stop = told_to_stop()
    db = create_engine(site.database_url)
    invoicer = Invoicer(db, interval_s=INVOICE_INTERVAL_S, wall_clock=site.now)
    invoicer.start()
    await until_stopped(stop)
    await invoicer.close()
    await db.dispose()


def told_to_stop() -> asyncio.Event:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    return stop


async def until_stopped(stop: asyncio.Event) -> None:
    parent = multiprocessing.parent_process()
    while not stop.is_set() and parent is not None and parent.is_alive():
        await asyncio.sleep(0.1)
    stop.set()


async def be_client(
    clock: Callable[[], float], spool: Spool, journal: int, stop: asyncio.Event
) -> None:
    """Ask again and again, and note what was asked before it is, and what was answered after."""
    while not stop.is_set():
        attempt_id = str(uuid7())
        plan = Plan(attempt_id)
        os.write(journal, f"asked {attempt_id}\n".encode())
        attempt = Attempt(
            id=attempt_id,
            request_id=f"req_{attempt_id}",
            org=plan.org,
            project="proj",
            key=f"key_{plan.org}",
            model=plan.model,
            prices=PRICES,
            admitted_at=clock(),
        )
        spool.attempt_opened(attempt)
        for step in plan.steps:
            await asyncio.sleep(THINK_S)
            spool.checkpoint(attempt_id, step, False)
        if plan.is_voided:
            await spool.void(attempt_id)
        else:
            await spool.close(
                UsageEvent(attempt=attempt, quantities=plan.bill, occurred_at=clock())
            )
            os.write(journal, f"answered {attempt_id}\n".encode())
        await asyncio.sleep(THINK_S)


async def ship_early(
    db: AsyncEngine,
    spool: Spool,
    alarms: Alarms,
    on_booked: OnBooked = worker.notify_nobody,
) -> list[UsageEvent]:
    """`ship_batch` with the bug."""
    batch = await spool.read_closed(worker.MAX_BATCH)
    await spool.commit(batch)
    await ingest(db, batch.events)
    await settle_late(db, batch.events)
    await on_booked(batch.events)
    return batch.events
