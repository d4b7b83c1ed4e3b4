"""The checks of the books: SQL queries that should find nothing, by complaint. A query returns the
names of the rows that a complaint is about. The checks of the ledger are in `ledger.accounts`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.alerts.alerts import booked_spend
from billing.invoices.lines.charges import CHARGED, CHARGES
from billing.ledger import accounts

ACCOUNT = "('receivable:' || i.org_id)"
FINAL = "i.state <> 'draft'"
# Invoices against the ledger: `charges` adds up events, these checks add up transfers. They name
# org, invoice, line, note or payment.
INVOICES = {
    "its lines differ from its sums": f"""
        SELECT i.id FROM invoices i LEFT JOIN (
            SELECT invoice_id, sum(exact_pico) AS exact, sum(amount_coins) AS coins,
                sum(residual_pico) AS residual
            FROM invoice_lines GROUP BY invoice_id
        ) l ON l.invoice_id = i.id
        WHERE {FINAL} AND (i.exact_pico, i.total_coins, i.residual_pico)
            IS DISTINCT FROM (coalesce(exact, 0), coalesce(coins, 0), coalesce(residual, 0))
    """,
    "its exact amount is not what is charged and what is left over": f"""
        SELECT l.id FROM invoice_lines l JOIN invoices i ON i.id = l.invoice_id
        WHERE {FINAL} AND l.exact_pico IS DISTINCT FROM
            l.amount_coins * i.coin_pico + l.residual_pico
    """,
    "its price times its quantity is not its exact amount": f"""
        SELECT l.id FROM invoice_lines l JOIN invoices i ON i.id = l.invoice_id
        WHERE {FINAL} AND l.pico_per_token * l.quantity <> l.exact_pico
    """,
    "all its invoices together differ from what the ledger charged it": f"""
        SELECT i.org_id FROM (
            SELECT DISTINCT ON (i.org_id) i.org_id, i.period_end, i.cutoff,
                (SELECT coalesce(sum(l.exact_pico), 0) FROM invoice_lines l
                    JOIN invoices f ON f.id = l.invoice_id
                    WHERE f.org_id = i.org_id AND f.state <> 'draft' AND l.kind <> 'adjustment')
                    AS invoiced
            FROM invoices i WHERE {FINAL} ORDER BY i.org_id, i.period_start DESC
        ) i CROSS JOIN LATERAL (
            SELECT coalesce({CHARGED.format(account=ACCOUNT)}, 0) AS charged
            FROM transfers t JOIN usage_events u ON u.id = t.event_id
            WHERE u.org = i.org_id AND {CHARGES.format(account=ACCOUNT)}
                AND u.admitted_at < i.period_end AND t.seq < i.cutoff
        ) t
        WHERE invoiced <> charged
    """,
    "its receivable does not hold whole coins of it": f"""
        SELECT i.id FROM invoices i LEFT JOIN (
            SELECT t.id, CASE WHEN t.debit LIKE 'receivable:%' THEN t.amount_pico
                ELSE -t.amount_pico END AS rounded_by
            FROM transfers t WHERE t.kind = 'rounding'
        ) t ON t.id = i.id || '.rounding'
        WHERE {FINAL} AND i.exact_pico + coalesce(rounded_by, 0) <> i.total_coins * i.coin_pico
    """,
    "its posting differs from it": """
        SELECT n.id FROM (
            SELECT n.id, total_coins * coin_pico AS amount_pico FROM credit_notes n
                JOIN (SELECT id, coin_pico FROM invoices) i ON i.id = n.invoice_id
            UNION ALL
            SELECT p.id, amount_coins * coin_pico FROM invoice_payments p
                JOIN (SELECT id, coin_pico FROM invoices) i ON i.id = p.invoice_id
                WHERE method = 'received'
            UNION ALL
            SELECT l.id, abs(l.exact_pico) FROM invoice_lines l
                JOIN (SELECT id, state FROM invoices) i ON i.id = l.invoice_id
                WHERE l.kind = 'adjustment' AND i.state <> 'draft' AND l.exact_pico <> 0
        ) n LEFT JOIN transfers t ON t.id = n.id
        WHERE t.amount_pico IS DISTINCT FROM n.amount_pico
    """,
    "more was taken back or settled than it asked for": f"""
        SELECT i.id FROM invoices i WHERE {FINAL} AND i.total_coins >= 0 AND (
            (SELECT coalesce(sum(total_coins), 0) FROM credit_notes n WHERE n.invoice_id = i.id)
                > i.total_coins
            OR (SELECT coalesce(sum(amount_coins), 0) FROM invoice_payments p
                WHERE p.invoice_id = i.id) NOT BETWEEN 0 AND i.total_coins)
    """,
    "its numbers have a gap": """
        SELECT issuer || ' ' || series FROM invoice_counters c JOIN (
            SELECT issuer, 'invoice' AS series, sequence FROM invoices WHERE sequence IS NOT NULL
            UNION ALL SELECT issuer, 'credit_note', sequence FROM credit_notes
        ) s USING (issuer, series)
        GROUP BY issuer, series, last HAVING count(*) <> last OR max(sequence) <> last
    """,
}
# Leases, burns and unpaid usage against the ledger. They name grant or transfer.
CREDITS = {
    "what is leased differs from what is pending": """
        SELECT coalesce(l.transfer_id, p.id) FROM credit_leases l FULL JOIN (
            SELECT id, debit FROM transfers t WHERE phase = 'pending'
                AND NOT EXISTS (SELECT FROM transfers r WHERE r.resolves = t.id)
        ) p ON p.id = l.transfer_id AND p.debit = 'grant:' || l.grant_id
        WHERE l.transfer_id IS NULL OR p.id IS NULL
    """,
    "what the grant has paid differs from what it was burned for": """
        SELECT grant_id FROM (
            SELECT grant_id, sum(amount_pico) AS burned FROM credit_burns GROUP BY grant_id
        ) b FULL JOIN (
            SELECT substr(grant_account, length('grant:') + 1) AS grant_id, sum(moved) AS paid
            FROM (
                SELECT debit AS grant_account, amount_pico AS moved FROM transfers
                WHERE kind = 'burn' OR phase = 'post'
                UNION ALL SELECT credit, -amount_pico FROM transfers WHERE kind = 'returned'
            ) m GROUP BY grant_account
        ) t USING (grant_id)
        WHERE burned IS DISTINCT FROM paid
    """,
    "what it owes differs from what nobody has paid": """
        SELECT transfer_id FROM unpaid_usage u LEFT JOIN transfers t ON t.id = u.transfer_id
            LEFT JOIN (
                SELECT transfer_id, sum(amount_pico) AS burned FROM credit_burns
                GROUP BY transfer_id
            ) b USING (transfer_id)
        -- An invoice may have paid a part of an event that was rated anew.
        WHERE CASE t.kind WHEN 'repriced' THEN t.amount_pico < u.amount_pico + coalesce(burned, 0)
            ELSE t.amount_pico IS DISTINCT FROM u.amount_pico + coalesce(burned, 0) END
    """,
}
_OF_EVENT = "concat('request ', request_id, ', event ', u.id)"
# Cache leases against billed cache writes and ratings. They name request or lease. The ledger's
# own checks compare refunds with transfers.
CACHE_LEASES = {
    "there are leases for more than was written": f"""
        SELECT {_OF_EVENT} FROM (
            SELECT event_id, sum(num_tokens) FILTER (WHERE ttl = '5m') AS tokens_5m,
                sum(num_tokens) FILTER (WHERE ttl = '1h') AS tokens_1h
            FROM cache_leases GROUP BY event_id
        ) l JOIN usage_events u ON u.id = event_id
        WHERE tokens_5m > cache_write_5m OR tokens_1h > cache_write_1h ORDER BY u.id
    """,
    "its refund is in none of its event's ratings": """
        SELECT id FROM cache_leases l WHERE refunded_pico > 0
            AND NOT EXISTS (SELECT FROM event_ratings r WHERE r.event_id = l.event_id)
    """,
}
# The spending of scopes with a cap against the rollups. They name scope and period.
SPEND = {
    "what it is said to have spent differs from its usage": f"""
        SELECT concat_ws('/', org_id, scope, scope_id, period,
            to_char(period_start AT TIME ZONE 'UTC', 'YYYY-MM-DD'))
        FROM spend_to_date s WHERE spent_pico <> {booked_spend("s")} ORDER BY 1
    """,
}


async def find_problems(queries: Mapping[str, str], db: AsyncEngine) -> list[str]:
    """Run checks on one snapshot, and return a line for each name that they find. `db`: of a role
    that sees every org's rows."""
    problems: list[str] = []
    async with db.connect() as conn:
        await conn.execution_options(isolation_level="REPEATABLE READ")
        for complaint, query in queries.items():
            found = await conn.execute(sa.text(query))
            problems.extend(f"{name}: {complaint}" for (name,) in found)
    return problems


check_ledger = partial(find_problems, accounts.CHECKS)
check_invoices = partial(find_problems, INVOICES)
check_credits = partial(find_problems, CREDITS)
check_cache_leases = partial(find_problems, CACHE_LEASES)
check_spend = partial(find_problems, SPEND)
ALL_CHECKS = (check_ledger, check_invoices, check_credits, check_cache_leases, check_spend)


async def check_all(db: AsyncEngine) -> list[str]:
    """Return all problems of the books; each group of checks reads a snapshot of its own."""
    return [problem for check in ALL_CHECKS for problem in await check(db)]
