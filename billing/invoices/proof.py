"""Everything that is wrong between ledger and invoices, by the ledger's own entries: a second way
to the same sums, over transfers where `charges` reads events.

At best it finds nothing.
"""

from __future__ import annotations

from functools import partial

from billing.checks import complaints
from billing.invoices.lines.charges import CHARGED, CHARGES

ACCOUNT = "('receivable:' || i.org_id)"
FINAL = "i.state <> 'draft'"
CHECKS = {
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

check = partial(complaints, CHECKS)
"""Naming org, invoice, line, note or payment."""
