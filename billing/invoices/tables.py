"""Tables of invoices, as migration 0026 makes them.

Triggers enforce that a final invoice changes only its state, and its lines never. Rows of accounts,
rates, payments and credit notes are only added. `*_pico` is exact, in pico-USD; `*_coins` counts
the smallest coins of the invoice's currency.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from billing.tables import MONEY, text_columns

metadata = sa.MetaData()


def _money(*names: str, nullable: bool = False) -> list[sa.Column[Any]]:
    return [sa.Column(name, MONEY, nullable=nullable) for name in names]


def _counts(*names: str, nullable: bool = False) -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.BigInteger, nullable=nullable) for name in names]


def _moments(*names: str, nullable: bool = False) -> list[sa.Column[Any]]:
    kind = sa.TIMESTAMP(timezone=True)
    return [sa.Column(name, kind, nullable=nullable) for name in names]


billing_accounts = sa.Table(
    "billing_accounts",
    metadata,
    sa.Column("org_id", sa.Text, primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True),
    *text_columns("currency", "timezone", "issuer"),
    *(
        sa.Column(name, sa.SmallInteger, nullable=False)
        for name in ("billing_day", "net_days", "grace_hours")
    ),
    *_moments("created_at"),
)

fx_rates = sa.Table(
    "fx_rates",
    metadata,
    sa.Column("currency", sa.Text, primary_key=True),
    sa.Column("valid_from", sa.TIMESTAMP(timezone=True), primary_key=True),
    *_money("coin_pico"),
    *text_columns("source"),
    *_moments("created_at"),
)

invoices = sa.Table(
    "invoices",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    *text_columns("org_id"),
    sa.Column("account_version", sa.Integer, nullable=False),
    *text_columns("currency", "issuer", "state"),
    *_moments("period_start", "period_end", "state_since", "created_at"),
    *_counts("since", "cutoff"),
    *_money("exact_pico"),
    *_money("coin_pico", "total_coins", "residual_pico", nullable=True),
    *_counts("sequence", nullable=True),
    *text_columns("number", nullable=True),
    *_moments("rate_from", "finalized_at", "due_at", nullable=True),
)

invoice_lines = sa.Table(
    "invoice_lines",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    *text_columns("org_id", "invoice_id"),
    sa.Column("position", sa.Integer, nullable=False),
    *text_columns("kind"),
    *_moments("usage_start", "usage_end"),
    *text_columns("project", "model", "tier", "component", "price_id"),
    *_counts("pico_per_token", nullable=True),
    *_money("quantity"),
    *_counts("num_requests"),
    *_money("exact_pico"),
    *_money("amount_coins", "residual_pico", nullable=True),
)

invoice_counters = sa.Table(
    "invoice_counters",
    metadata,
    sa.Column("issuer", sa.Text, primary_key=True),
    sa.Column("series", sa.Text, primary_key=True),
    *_counts("last"),
)

invoice_transitions = sa.Table(
    "invoice_transitions",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    *text_columns("org_id", "invoice_id", "state"),
    *_moments("occurred_at"),
    *_moments("dispatched_at", nullable=True),
)

credit_notes = sa.Table(
    "credit_notes",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    *text_columns("org_id", "invoice_id", "issuer", "number", "reason"),
    *_counts("sequence"),
    *_money("total_coins"),
    *_moments("created_at"),
)

credit_note_lines = sa.Table(
    "credit_note_lines",
    metadata,
    sa.Column("credit_note_id", sa.Text, primary_key=True),
    sa.Column("line_id", sa.Text, primary_key=True),
    *text_columns("org_id"),
    *_money("amount_coins"),
)

invoice_payments = sa.Table(
    "invoice_payments",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    *text_columns("org_id", "invoice_id", "method", "reference"),
    *_money("amount_coins"),
    *_moments("created_at"),
)
