"""Tables of invoices, as migration 0026 makes them.

Triggers enforce that a final invoice changes only its state, and its lines never. Rows of accounts,
rates, payments and credit notes are only added. `*_pico` is exact, in pico-USD; `*_coins` counts
the smallest coins of the invoice's currency.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from billing.tables import count_columns, moment_columns, money_columns, text_columns

metadata = sa.MetaData()


def _table(name: str, *columns: sa.Column[Any]) -> sa.Table:
    return sa.Table(name, metadata, *columns)


billing_accounts = _table(
    "billing_accounts",
    *text_columns("org_id", primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True),
    *text_columns("currency", "timezone", "issuer"),
    *(
        sa.Column(name, sa.SmallInteger, nullable=False)
        for name in ("billing_day", "net_days", "grace_hours")
    ),
    *moment_columns("created_at"),
)

fx_rates = _table(
    "fx_rates",
    *text_columns("currency", primary_key=True),
    *moment_columns("valid_from", primary_key=True),
    *money_columns("coin_pico"),
    *text_columns("source"),
    *moment_columns("created_at"),
)

invoices = _table(
    "invoices",
    *text_columns("id", primary_key=True),
    *text_columns("org_id"),
    sa.Column("account_version", sa.Integer, nullable=False),
    *text_columns("currency", "issuer", "state"),
    *moment_columns("period_start", "period_end", "state_since", "created_at"),
    *count_columns("since", "cutoff"),
    *money_columns("exact_pico"),
    *money_columns("coin_pico", "total_coins", "residual_pico", nullable=True),
    *count_columns("sequence", nullable=True),
    *text_columns("number", nullable=True),
    *moment_columns("rate_from", "finalized_at", "due_at", nullable=True),
)

invoice_lines = _table(
    "invoice_lines",
    *text_columns("id", primary_key=True),
    *text_columns("org_id", "invoice_id"),
    sa.Column("position", sa.Integer, nullable=False),
    *text_columns("kind"),
    *moment_columns("usage_start", "usage_end"),
    *text_columns("project", "model", "tier", "component", "price_id"),
    *count_columns("pico_per_token", nullable=True),
    *money_columns("quantity"),
    *count_columns("num_requests"),
    *money_columns("exact_pico"),
    *money_columns("amount_coins", "residual_pico", nullable=True),
)

invoice_counters = _table(
    "invoice_counters", *text_columns("issuer", "series", primary_key=True), *count_columns("last")
)

invoice_transitions = _table(
    "invoice_transitions",
    *text_columns("id", primary_key=True),
    *text_columns("org_id", "invoice_id", "state"),
    *moment_columns("occurred_at"),
    *moment_columns("dispatched_at", nullable=True),
)

credit_notes = _table(
    "credit_notes",
    *text_columns("id", primary_key=True),
    *text_columns("org_id", "invoice_id", "issuer", "number", "reason"),
    *count_columns("sequence"),
    *money_columns("total_coins"),
    *moment_columns("created_at"),
)

credit_note_lines = _table(
    "credit_note_lines",
    *text_columns("credit_note_id", "line_id", primary_key=True),
    *text_columns("org_id"),
    *money_columns("amount_coins"),
)

invoice_payments = _table(
    "invoice_payments",
    *text_columns("id", primary_key=True),
    *text_columns("org_id", "invoice_id", "method", "reference"),
    *money_columns("amount_coins"),
    *moment_columns("created_at"),
)
