"""`tollgate billing`: a period is priced anew as it was shown; a draft is made final at once."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable

from sqlalchemy.ext.asyncio import AsyncEngine

from billing.invoices.accounts import BillingTerms, set_account
from billing.invoices.closing import close
from gateway.db import create_engine
from gateway.tenancy.orgs import find_org
from tests.billing.invoices.billed import DECEMBER, NOVEMBER, at, book, tokens
from tests.gateway.cli.test_main import environ, folder, invoke

__all__ = ["environ", "folder"]
DAYS = ("--org", "default", "--from", "2026-11-01", "--to", "2026-12-01")


def in_database(environ: dict[str, str], work: Callable[[AsyncEngine], Awaitable[str]]) -> str:
    async def run() -> str:
        db = create_engine(environ["TOLLGATE_DATABASE_URL"])
        try:
            return await work(db)
        finally:
            await db.dispose()

    return asyncio.run(run())


async def use(db: AsyncEngine) -> str:
    """A draft of November."""
    async with db.begin() as conn:
        org = await find_org(conn, name="default")
        await set_account(conn, org_id=org.id, terms=BillingTerms(), now=NOVEMBER)
    await book(db, tokens(at(2026, 11, 10), 1000, 7, org=org.id))
    draft = await close(db, org_id=org.id, now=DECEMBER)
    assert draft is not None
    return draft.id


def test_a_period_is_seen_and_applied_and_its_draft_made_final(environ: dict[str, str]) -> None:
    assert invoke(environ, "migrate").exit_code == 0
    draft = in_database(environ, use)

    def billing(*arguments: str) -> tuple[int, str]:
        done = invoke(environ, "billing", *arguments)
        return done.exit_code, done.output

    status, text = billing("rerate", *DAYS)
    assert status == 0, text
    assert "not invoiced: proj_a penny default output: 1000 in 1 events" in text
    digest = re.search("Digest: ([0-9a-f]{64})", text)
    assert digest is not None
    assert json.loads(billing("rerate", *DAYS, "--json")[1])["digest"] == digest[1]
    status, text = billing("rerate", *DAYS, "--apply", "0" * 64)
    assert status == 2 and "the preview has changed" in text
    for _ in range(2):
        applied = billing("rerate", *DAYS, "--apply", digest[1])
        assert applied == (0, "1 events are priced anew.\n")
    assert billing("rerate", *DAYS) == (0, "Nothing differs.\n")
    status, text = billing("finalize", "--org", "default", draft)
    assert (status, text) == (0, f"{draft} is invoice TG-000001.\n")
    status, text = billing("finalize", "--org", "default", "inv_x")
    assert status == 2 and "no invoice" in text
    assert "The books balance." in invoke(environ, "reconcile").output
