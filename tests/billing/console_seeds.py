"""Invoices, credits and top-ups of the organizations that `server` serves."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import sqlalchemy as sa

from billing.events import Price, Quantities
from billing.ingestion.ingest import ingest
from billing.invoices.accounts import BillingTerms, set_account
from billing.money import PICO_PER_USD
from gateway.audit.log import COMMAND_LINE
from gateway.tenancy.money.credits import create_credit
from tests.billing.samples import an_attempt, an_event
from tests.gateway.console.server import ConsoleServer, Organization

CENT = PICO_PER_USD // 100
DAY = timedelta(days=1)
NEWEST = datetime(2026, 11, 1, tzinfo=UTC)
INVOICE = sa.text("""
    INSERT INTO invoices (id, org_id, account_version, currency, issuer, state, state_since,
        period_start, period_end, since, cutoff, exact_pico)
    SELECT 'inv_' || :org || '_' || to_char(start, 'YYYYMMDD'), :org, 1, 'USD', 'TG', 'draft',
        now(), start, start + interval '1 day', 0, 0, 0
    FROM generate_series(0, :most - 1) n,
        LATERAL (SELECT CAST(:newest AS timestamptz) - make_interval(days => n) AS start) s
""")
LINE = sa.text("""
    INSERT INTO invoice_lines (id, org_id, invoice_id, position, kind, usage_start, usage_end,
        project, model, tier, component, price_id, pico_per_token, quantity, num_requests,
        exact_pico, amount_coins, residual_pico)
    SELECT id || '_' || lpad(n::text, 6, '0'), org_id, id, n, 'usage', period_start, period_end,
        :project, :model, 'default', (ARRAY['uncached_input', 'output'])[1 + n % 2], 'p', 150000,
        1000000, 40, 150000000000, 15, 0
    FROM invoices, generate_series(1, :lines) n WHERE org_id = :org
""")
FINAL = sa.text("""
    UPDATE invoices SET state = CASE WHEN period_start >= CAST(:open AS timestamptz)
            THEN 'past_due' ELSE 'paid' END,
        sequence = :first + nth, number = 'TG-' || lpad((:first + nth)::text, 6, '0'),
        finalized_at = period_end, due_at = period_end + interval '14 days',
        coin_pico = 10000000000, exact_pico = :lines * 150000000000, total_coins = :lines * 15,
        residual_pico = 0
    FROM (SELECT id, row_number() OVER (ORDER BY period_start) AS nth FROM invoices
        WHERE org_id = :org AND period_start < :newest) n
    WHERE invoices.id = n.id
""")
PAID = sa.text("""
    INSERT INTO invoice_payments
    SELECT 'payment_' || id, org_id, id, 'received', :reference, total_coins, finalized_at
    FROM invoices WHERE org_id = :org AND state = 'paid'
""")
ASKED = sa.text("""
    INSERT INTO top_ups (id, org_id, amount_pico, left_pico, state, expires_at)
    VALUES ('topup_' || :org, :org, 100000000000000, 3000000000000, 'requested',
        now() + interval '2 days')
""")


async def invoices(server: ConsoleServer, org: Organization, most: int, model: str) -> None:
    """`most` invoices of a day each, of which the newest is a draft and the one before late."""
    values = {
        "org": org.id,
        "project": org.project_id,
        "model": model,
        "most": most,
        "newest": NEWEST,
        "open": NEWEST - DAY,
        "first": 0 if org is server.little else 10_000,
        "lines": 3 if org is server.little else 2,
        "reference": model,
    }
    async with server.services.system_db.begin() as conn:
        await set_account(conn, org_id=org.id, terms=BillingTerms())
        for statement in (INVOICE, LINE, FINAL, PAID):
            await conn.execute(statement, values)


async def credits(server: ConsoleServer, org: Organization, number: int) -> None:
    for _ in range(number):
        await create_credit(
            server.services.system_db,
            org_id=org.id,
            amount_pico=25 * PICO_PER_USD,
            operator_org=server.little.id,
            actor=COMMAND_LINE,
        )
    async with server.services.system_db.begin() as conn:
        await conn.execute(ASKED, {"org": org.id})


async def usage(server: ConsoleServer, org: Organization, model: str) -> None:
    """A request a day for six weeks until today, at a price that is not the book's."""
    prices = {"output": Price("mistaken", 500_000)}
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    moments = [(today - n * DAY).timestamp() + 60 for n in range(42)]
    events = [
        an_event(
            an_attempt(
                org=org.id, project=org.project_id, model=model, prices=prices, admitted_at=at
            ),
            Quantities(output=2_000_000 + 10_000 * position),
        )
        for position, at in enumerate(moments)
    ]
    await ingest(server.services.system_db, events)


async def sow_billing(server: ConsoleServer, hostile: str, most: int) -> None:
    await usage(server, server.little, "penny")
    await usage(server, server.much, hostile)
    await invoices(server, server.little, 3, "penny")
    await invoices(server, server.much, most, hostile)
    await credits(server, server.little, 2)
    await credits(server, server.much, 60)


def invoice_addresses(org: Organization) -> list[str]:
    days = (NEWEST, NEWEST - DAY)
    return [f"/console/billing/invoices/inv_{org.id}_{day:%Y%m%d}" for day in days]
