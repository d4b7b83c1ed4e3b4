"""Billing's tables, as migrations make them, and the SQL that all queries of them share.

Money is whole pico-USD, moments are UTC. Rows of `usage_events`, `event_ratings`, `transfers` and
`prices` never change; the view `entries` shows both sides of each transfer that is not pending.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, TSTZRANGE

from billing.events import COMPONENTS, Quantities

S = TypeVar("S", bound=msgspec.Struct)
AnyRow = sa.Row[*tuple[Any, ...]]
metadata = sa.MetaData()
MONEY = sa.Numeric(38, 0)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def to_moment(unix_time: float) -> datetime:
    """Unix seconds to UTC, rounded to the microsecond that Postgres keeps.

    Raises: ValueError, OverflowError for a number that is not a moment.
    """
    return EPOCH + timedelta(seconds=unix_time)


def to_microseconds(unix_time: float) -> int:
    """Return the same moment in microseconds since 1970. Raises: as `to_moment`."""
    whole = int(unix_time)
    return whole * 1_000_000 + round((unix_time - whole) * 1e6)


def amount_column(component: str) -> str:
    """Return the name of the column with a component's amount in pico-USD."""
    return f"{component}_pico"


AMOUNTS = tuple(amount_column(component) for component in COMPONENTS)
REQUESTS = tuple(f"{component}_requests" for component in COMPONENTS)
"""Columns that count the requests which used a component."""
TOTAL_QUANTITY = " + ".join(COMPONENTS)
TOTAL_PICO = " + ".join(AMOUNTS)
"""SQL: the quantities and the amounts of a row, added up over all components."""
_COMMON = ("uncached_input_pico", "cache_read_pico", "cache_write_5m_pico", "output_pico")
SUM_PICO = " + ".join(
    f"sum({name})" if name in _COMMON else f"coalesce(sum({name}) FILTER (WHERE {name} <> 0), 0)"
    for name in AMOUNTS
)
"""SQL: the sum of `TOTAL_PICO` over rows, in two thirds of its time: to add up numerics is what
takes it, and most rows have none of some components."""


def total_pico(columns: sa.ColumnCollection[str, Any]) -> sa.ColumnElement[Any]:
    """Return the amount of a row over all components, as `TOTAL_PICO`."""
    return sum((columns[name] for name in AMOUNTS), sa.literal(0))


def sums_of(names: Iterable[str]) -> str:
    """Return SQL that adds up columns under their own names."""
    return ", ".join(f"sum({name}) AS {name}" for name in names)


def columns_of(table: str, names: Iterable[str]) -> str:
    """Return SQL that lists columns of a table or an alias."""
    return ", ".join(f"{table}.{name}" for name in names)


def rated_amounts(rating: str, event: str) -> str:
    """Return SQL of an event's amounts by a rating, or as they were booked where there is none."""
    return ", ".join(f"coalesce({rating}.{name}, {event}.{name}) AS {name}" for name in AMOUNTS)


def read_struct(kind: type[S], row: AnyRow, **others: Any) -> S:
    """Make a struct of a row's columns and of `others`: decimals become integers, moments UTC and
    arrays tuples."""
    columns = row._mapping
    names = [name for name in kind.__struct_fields__ if name not in others]
    return kind(**{name: _to_python(columns[name]) for name in names}, **others)


def _to_python(value: Any) -> Any:
    match value:
        case Decimal():
            return int(value)
        case datetime():
            return value.astimezone(UTC)
        case list():
            return tuple(value)
    return value


def to_arrays(kind: type[msgspec.Struct], items: Iterable[msgspec.Struct]) -> dict[str, list[Any]]:
    """Return the fields of structs as arrays by name, for `unnest`."""
    rows = [msgspec.structs.astuple(item) for item in items]
    return {name: [row[at] for row in rows] for at, name in enumerate(kind.__struct_fields__)}


def read_quantities(row: AnyRow) -> Quantities:
    return Quantities(**{name: row._mapping[name] for name in COMPONENTS})


def _columns(
    kind: Any, *names: str, nullable: bool = False, primary_key: bool = False
) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=nullable, primary_key=primary_key) for name in names]


text_columns = partial(_columns, sa.Text)
money_columns = partial(_columns, MONEY)
count_columns = partial(_columns, sa.BigInteger)
moment_columns = partial(_columns, sa.TIMESTAMP(timezone=True))


def _table(name: str, *columns: sa.Column[Any]) -> sa.Table:
    return sa.Table(name, metadata, *columns)


def _seq() -> sa.Column[int]:
    """Return the column with the order of booking, which is exact under an exclusive lock of the
    books (`spend_totals.hold_books`)."""
    drawn = sa.text("nextval('posting_seq')")
    return sa.Column("seq", sa.BigInteger, nullable=False, server_default=drawn)


def _usage_columns() -> list[sa.Column[Any]]:
    """Return the columns of a quantity and an amount for each component."""
    return [*count_columns(*COMPONENTS), *money_columns(*AMOUNTS)]


price_keys = _table(
    "price_keys",
    *count_columns("id", primary_key=True),
    *text_columns("price_list", "model", "tier", "component"),
    *count_columns("min_total_input"),
)

prices = _table(
    "prices",
    *text_columns("price_id", primary_key=True),
    *count_columns("key_id", "pico_per_token"),
    sa.Column("valid", TSTZRANGE, nullable=False),
)

price_rules = _table(
    "price_rules",
    *text_columns("rule_id", primary_key=True),
    *text_columns("price_list", "slot"),
    sa.Column(
        "slot_id", sa.BigInteger, sa.Computed("hashtextextended(slot, 0) >> 1"), nullable=True
    ),
    sa.Column("content", JSONB, nullable=False),
    sa.Column("valid", TSTZRANGE, nullable=False),
)

usage_events = _table(
    "usage_events",
    *text_columns("id", primary_key=True),
    *text_columns("request_id", "org", "project", "key", "model"),
    *text_columns("lane", "tier", "kind", "finish", "price_list"),
    sa.Column("estimated", sa.Boolean, nullable=False),
    *_usage_columns(),
    sa.Column("suspended", sa.Boolean, nullable=False),
    sa.Column("price_set", sa.Uuid, nullable=False),
    *count_columns("band"),
    sa.Column("late", sa.Boolean, nullable=False),
    sa.Column("digest", sa.LargeBinary, nullable=False),
    *moment_columns("admitted_at", "occurred_at", "ingested_at"),
    _seq(),
)

reratings = _table(
    "reratings",
    *text_columns("id", primary_key=True),
    *text_columns("org_id"),
    *moment_columns("starts_at", "ends_at"),
    *text_columns("model", "price_list", nullable=True),
    *text_columns("digest"),
    sa.Column("tariff", JSONB, nullable=False),
    sa.Column("lines", JSONB, nullable=False),
    *count_columns("cutoff", "num_events", "num_applied"),
    *moment_columns("seen_at", nullable=True),
    *text_columns("seen_id"),
    *moment_columns("created_at"),
    *moment_columns("applied_at", nullable=True),
)

event_ratings = _table(
    "event_ratings",
    *text_columns("event_id", primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    *text_columns("org_id"),
    *text_columns("rerating_id", nullable=True),
    sa.Column("prices", JSONB, nullable=False),
    *money_columns(*AMOUNTS),
    *moment_columns("admitted_at"),
    _seq(),
)

price_sets = _table(
    "price_sets",
    sa.Column("id", sa.Uuid, primary_key=True),
    sa.Column("prices", JSONB, nullable=False),
)

priced_events = (
    sa.select(usage_events, price_sets.c.prices)
    .join(price_sets, price_sets.c.id == usage_events.c.price_set)
    .subquery("priced_events")
)
"""Events with the prices at which they were admitted."""

usage_conflicts = _table(
    "usage_conflicts",
    *text_columns("event_id", primary_key=True),
    sa.Column("digest", sa.LargeBinary, primary_key=True),
    sa.Column("event", JSONB, nullable=False),
    *moment_columns("seen_at"),
)


def _rollup(name: str, unit: str, *keys: str) -> sa.Table:
    """Define a table with sums of usage by hour or day of admission. `num_embeddings` counts the
    requests with embedding input."""
    return _table(
        name,
        *text_columns("org", primary_key=True),
        *moment_columns(unit, primary_key=True),
        *text_columns(*keys, *GROUPED, primary_key=True),
        sa.Column("batch", sa.Boolean, primary_key=True),
        *_usage_columns(),
        *count_columns("num_requests"),
        sa.Column("num_embeddings", sa.BigInteger, nullable=False, server_default="0"),
    )


GROUPED = ("project", "key", "model", "tier")
usage_hourly = _rollup("usage_hourly", "hour")
usage_daily = _rollup("usage_daily", "day")
usage_tags_daily = _rollup("usage_tags_daily", "day", "tag", "value")

event_tags = _table(
    "event_tags",
    *text_columns("event_id", primary_key=True),
    *text_columns("org"),
    sa.Column("tags", JSONB, nullable=False),
)

disputed_usage = _table(
    "disputed_usage",
    *text_columns("event_id", primary_key=True),
    *text_columns("request_id", "org", "model", "upstream"),
    *count_columns("billed_tokens", "input_tokens", "output_tokens"),
    *moment_columns("admitted_at"),
)
"""A row holds what an upstream claimed of an event beyond what was billed."""

usage_tags = _table(
    "usage_tags",
    *text_columns("org", primary_key=True),
    *moment_columns("day", primary_key=True),
    *text_columns("tag", "value", primary_key=True),
)

usage_charges = _table(
    "usage_charges",
    *text_columns("org", primary_key=True),
    *moment_columns("hour", primary_key=True),
    *text_columns("project", "model", "tier", primary_key=True),
    sa.Column("price_set", sa.Uuid, primary_key=True),
    *count_columns("band", primary_key=True),
    *_usage_columns(),
    *count_columns(*REQUESTS),
)

accounts = sa.Table(
    "accounts", metadata, sa.Column("id", sa.Text, primary_key=True), *text_columns("kind")
)

transfers = _table(
    "transfers",
    *text_columns("id", primary_key=True),
    *text_columns("event_id", nullable=True),
    *text_columns("debit", "credit"),
    *money_columns("amount_pico"),
    *text_columns("kind", "phase"),
    *text_columns("resolves", nullable=True),
    *moment_columns("expires_at", nullable=True),
    *text_columns("corrects", nullable=True),
    *moment_columns("admitted_at", "posted_at"),
    _seq(),
)

balances = _table(
    "balances",
    *text_columns("account", primary_key=True),
    *money_columns("debits_pico", "credits_pico", "pending_debits_pico", "pending_credits_pico"),
)

alerts = _table(
    "alerts",
    *text_columns("id", primary_key=True),
    *text_columns("org_id", "scope", "scope_id", "measure", "cap_id", "period"),
    *moment_columns("period_start"),
    sa.Column("threshold", sa.SmallInteger, nullable=False),
    *money_columns("ceiling", "used"),
    *text_columns("reason"),
    *moment_columns("occurred_at"),
    *moment_columns("dispatched_at", nullable=True),
)

spend_to_date = _table(
    "spend_to_date",
    *text_columns("org_id", "scope", "scope_id", "period", primary_key=True),
    *moment_columns("period_start", primary_key=True),
    *money_columns("spent_pico"),
)

ceiling_minutes = _table(
    "ceiling_minutes",
    *text_columns("org_id", "scope", "scope_id", "measure", primary_key=True),
    *moment_columns("minute", primary_key=True),
    *count_columns("used"),
)

credit_grants = _table(
    "credit_grants",
    *text_columns("id", primary_key=True),
    *text_columns("org_id"),
    *money_columns("amount_pico"),
    sa.Column("priority", sa.SmallInteger, nullable=False),
    *moment_columns("expires_at", nullable=True),
    sa.Column("models", ARRAY(sa.Text), nullable=True),
    sa.Column("components", ARRAY(sa.Text), nullable=True),
    *moment_columns("created_at"),
    *moment_columns("revoked_at", "ended_at", nullable=True),
)

credit_lines = _table(
    "credit_lines",
    *text_columns("org_id", primary_key=True),
    *text_columns("account"),
    *count_columns("version", "told"),
    *money_columns("paid_pico"),
    *moment_columns("leased_until", "leased_at", nullable=True),
    *money_columns("spent_pico"),
    sa.Column("is_low", sa.Boolean, nullable=False),
    *money_columns("dry_at_pico", nullable=True),
    *text_columns("top_up_id", nullable=True),
    *moment_columns("watched_at"),
)

balance_settings = _table(
    "balance_settings",
    *text_columns("org_id", primary_key=True),
    *money_columns("low_pico", "top_up_pico", "top_up_below_pico", nullable=True),
    sa.Column("top_ups_per_day", sa.SmallInteger, nullable=True),
)

top_ups = _table(
    "top_ups",
    *text_columns("id", primary_key=True),
    *text_columns("org_id"),
    *money_columns("amount_pico", "left_pico"),
    *text_columns("state"),
    *moment_columns("requested_at", "expires_at"),
    *moment_columns("ended_at", nullable=True),
    *text_columns("credit_id", "failure", "told", nullable=True),
)

credit_leases = _table(
    "credit_leases",
    *text_columns("grant_id", primary_key=True),
    *text_columns("org_id", "transfer_id"),
)

unpaid_usage = _table(
    "unpaid_usage",
    *text_columns("transfer_id", primary_key=True),
    *text_columns("org_id", "event_id"),
    *money_columns("amount_pico"),
)

credit_burns = _table(
    "credit_burns",
    *text_columns("transfer_id", "grant_id", primary_key=True),
    *text_columns("org_id", "event_id"),
    *count_columns("version", primary_key=True),
    *money_columns("amount_pico"),
)

reconciliations = _table(
    "reconciliations",
    *text_columns("host", primary_key=True),
    sa.Column("day", sa.Date, primary_key=True),
    *moment_columns("started_at"),
    *moment_columns("ended_at", nullable=True),
    *(sa.Column(name, sa.ARRAY(sa.Text), nullable=False) for name in ("problems", "unknown")),
    *count_columns("num_waiting"),
)

cache_leases = _table(
    "cache_leases",
    *text_columns("id", primary_key=True),
    *text_columns("org_id", "event_id", "model", "engine", "engine_id", "ttl"),
    *count_columns("num_tokens", "end_tokens"),
    sa.Column("prefix", sa.LargeBinary, nullable=False),
    *moment_columns("granted_at", "kept_until"),
    *moment_columns("ended_at", nullable=True),
    *text_columns("outcome", "refund_id", nullable=True),
    *money_columns("refunded_pico", nullable=True),
    *count_columns("refund_seq", nullable=True),
)

cache_writes = _table(
    "cache_writes",
    *text_columns("event_id", primary_key=True),
    *text_columns("org_id"),
    *moment_columns("booked_at"),
)

superseded_requests = _table(
    "superseded_requests",
    *text_columns("request_id", primary_key=True),
    *text_columns("org_id", "superseded_by"),
    *moment_columns("claimed_at", "superseded_at"),
)
"""Requests that were repeated after their gateway died; their charges are reversed."""


def new_id_sql(prefix: str, later_ms: str = "0") -> str:
    """Return SQL that makes an id: the prefix and a new UUIDv7 (RFC 9562)."""
    return f"""
    '{prefix}' || lpad(to_hex(floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint
        + {later_ms}), 12, '0') || '7' || substr(replace(gen_random_uuid()::text, '-', ''), 14)
    """
