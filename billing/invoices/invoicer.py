"""The invoicer drafts periods that have ended, finalizes drafts after their grace period, and duns
unpaid invoices. Each gateway runs one, and one of them looks at a time.

An org whose invoice cannot be made, because its currency has no rate, is logged and skipped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.errors import InvoicingConflict
from billing.invoices.accounts import account_of
from billing.invoices.closing import close, finalize, is_past_grace
from billing.invoices.collection import dun
from billing.invoices.due import orgs_due
from billing.invoices.invoice import latest_invoice
from billing.invoices.states import DRAFT
from billing.invoices.suspension import has_changed
from billing.tables import to_moment
from foundation.periodic import Periodic

log = logging.getLogger(__name__)

INVOICING = 0x696E766F6963696E
"""Postgres advisory lock: "invoicin" in ASCII."""
INTERVAL_S = 60.0
"""An invoice is late by at most so long."""
MAX_PERIODS = 120
"""An org's periods that one run catches up with: ten years of months."""


class Invoicer:
    """Drafts, finalizes and duns invoices.

    `db`: of a role that sees every org's rows. `wall_clock`: Unix seconds. `on_suspension`: called
    when an org may have been suspended or reinstated, and again for some minutes.
    """

    def __init__(
        self,
        db: AsyncEngine,
        *,
        interval_s: float = INTERVAL_S,
        wall_clock: Callable[[], float] = time.time,
        on_suspension: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._db, self._wall_clock, self._on_suspension = db, wall_clock, on_suspension
        self._looking = Periodic(
            "invoicer",
            interval_s,
            lambda: self.look(),
            log=log,
            failure="invoices wait",
            expected=(SQLAlchemyError, OSError),
            at_once=False,
        )

    def start(self) -> None:
        self._looking.start()

    async def close(self) -> None:
        """End the task. A draft that it was adding up stays a draft."""
        await self._looking.close()

    async def look(self) -> None:
        """Do everything that is due, unless another gateway is at it. Raises: SQLAlchemyError when
        Postgres is away."""
        async with self._db.begin() as held:
            if await held.scalar(sa.select(sa.func.pg_try_advisory_xact_lock(INVOICING))):
                await self._look(to_moment(self._wall_clock()))

    async def _look(self, now: datetime) -> None:
        async with self._db.connect() as conn:
            orgs = await orgs_due(conn, now)
        for org_id in orgs:
            try:
                await self._catch_up(org_id, now)
            except InvoicingConflict as error:
                log.warning("no invoice for %s yet: %s", org_id, error.message)
        while await dun(self._db, now):
            continue
        if self._on_suspension is not None:
            async with self._db.connect() as conn:
                changed = await has_changed(conn, now)
            if changed:
                await self._on_suspension()

    async def _catch_up(self, org_id: str, now: datetime) -> None:
        for _ in range(MAX_PERIODS):
            await close(self._db, org_id=org_id, now=now)
            async with self._db.connect() as conn:
                newest = await latest_invoice(conn, org_id=org_id)
                if newest is None or newest.state != DRAFT:
                    return
                account = await account_of(conn, org_id, version=newest.account_version)
            assert account is not None, "a draft names its account"
            if not is_past_grace(account, newest, now):
                return
            await finalize(self._db, org_id=org_id, invoice_id=newest.id, now=now)
