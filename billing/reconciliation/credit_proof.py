"""Everything that is wrong between the ledger and what is leased, burned and owed of credits.

At best it finds nothing.
"""

from __future__ import annotations

from functools import partial

from billing.checks import complaints

CHECKS = {
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
        -- Of what was rated anew a part may have been paid by an invoice.
        WHERE CASE t.kind WHEN 'repriced' THEN t.amount_pico < u.amount_pico + coalesce(burned, 0)
            ELSE t.amount_pico IS DISTINCT FROM u.amount_pico + coalesce(burned, 0) END
    """,
}

check = partial(complaints, CHECKS)
"""Naming grant or transfer."""
