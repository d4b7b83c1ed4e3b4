"""Billing's tables, as migrations make them, and the SQL that all queries of them share.

Money is whole pico-USD, moments are UTC. Rows of `usage_events`, `event_ratings`, `transfers` and
`prices` never change; the view `entries` shows both sides of each transfer that is not pending.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
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


def text_columns(*names: str, nullable: bool = False) -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.Text, nullable=nullable) for name in names]


def _moment(name: str) -> sa.Column[datetime]:
    return sa.Column(name, sa.TIMESTAMP(timezone=True), nullable=False)


def _seq() -> sa.Column[int]:
    """Return the column with the order of booking, which is exact under an exclusive lock of the
    books (`spend_totals.hold_books`)."""
    drawn = sa.text("nextval('posting_seq')")
    return sa.Column("seq", sa.BigInteger, nullable=False, server_default=drawn)


def _usage_columns() -> list[sa.Column[Any]]:
    """Return the columns of a quantity and an amount for each component."""
    return [
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in COMPONENTS),
        *(sa.Column(name, MONEY, nullable=False) for name in AMOUNTS),
    ]


price_keys = sa.Table(
    "price_keys",
    metadata,
    sa.Column("id", sa.BigInteger, primary_key=True),
    *text_columns("price_list", "model", "tier", "component"),
    sa.Column("min_total_input", sa.BigInteger, nullable=False),
)

prices = sa.Table(
    "prices",
    metadata,
    sa.Column("price_id", sa.Text, primary_key=True),
    sa.Column("key_id", sa.BigInteger, nullable=False),
    sa.Column("pico_per_token", sa.BigInteger, nullable=False),
    sa.Column("valid", TSTZRANGE, nullable=False),
)

price_rules = sa.Table(
    "price_rules",
    metadata,
    sa.Column("rule_id", sa.Text, primary_key=True),
    *text_columns("price_list", "slot"),
    sa.Column(
        "slot_id", sa.BigInteger, sa.Computed("hashtextextended(slot, 0) >> 1"), nullable=True
    ),
    sa.Column("content", JSONB, nullable=False),
    sa.Column("valid", TSTZRANGE, nullable=False),
)

usage_events = sa.Table(
    "usage_events",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    *text_columns("request_id", "org", "project", "key", "model", "lane", "tier", "kind", "finish"),
    *text_columns("price_list"),
    sa.Column("estimated", sa.Boolean, nullable=False),
    *_usage_columns(),
    sa.Column("suspended", sa.Boolean, nullable=False),
    sa.Column("price_set", sa.Uuid, nullable=False),
    sa.Column("band", sa.BigInteger, nullable=False),
    sa.Column("late", sa.Boolean, nullable=False),
    sa.Column("digest", sa.LargeBinary, nullable=False),
    _moment("admitted_at"),
    _moment("occurred_at"),
    _moment("ingested_at"),
    _seq(),
)

reratings = sa.Table(
    "reratings",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    *text_columns("org_id"),
    _moment("starts_at"),
    _moment("ends_at"),
    *text_columns("model", "price_list", nullable=True),
    *text_columns("digest"),
    sa.Column("tariff", JSONB, nullable=False),
    sa.Column("lines", JSONB, nullable=False),
    *(
        sa.Column(name, sa.BigInteger, nullable=False)
        for name in ("cutoff", "num_events", "num_applied")
    ),
    sa.Column("seen_at", sa.TIMESTAMP(timezone=True), nullable=True),
    *text_columns("seen_id"),
    _moment("created_at"),
    sa.Column("applied_at", sa.TIMESTAMP(timezone=True), nullable=True),
)

event_ratings = sa.Table(
    "event_ratings",
    metadata,
    sa.Column("event_id", sa.Text, primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    *text_columns("org_id"),
    *text_columns("rerating_id", nullable=True),
    sa.Column("prices", JSONB, nullable=False),
    *(sa.Column(name, MONEY, nullable=False) for name in AMOUNTS),
    _moment("admitted_at"),
    _seq(),
)

price_sets = sa.Table(
    "price_sets",
    metadata,
    sa.Column("id", sa.Uuid, primary_key=True),
    sa.Column("prices", JSONB, nullable=False),
)

priced_events = (
    sa.select(usage_events, price_sets.c.prices)
    .join(price_sets, price_sets.c.id == usage_events.c.price_set)
    .subquery("priced_events")
)
"""Events with the prices at which they were admitted."""

usage_conflicts = sa.Table(
    "usage_conflicts",
    metadata,
    sa.Column("event_id", sa.Text, primary_key=True),
    sa.Column("digest", sa.LargeBinary, primary_key=True),
    sa.Column("event", JSONB, nullable=False),
    _moment("seen_at"),
)


def _rollup(name: str, unit: str, *keys: str) -> sa.Table:
    """Define a table with sums of usage by hour or day of admission. `num_embeddings` counts the
    requests with embedding input."""
    return sa.Table(
        name,
        metadata,
        sa.Column("org", sa.Text, primary_key=True),
        sa.Column(unit, sa.TIMESTAMP(timezone=True), primary_key=True),
        *(sa.Column(each, sa.Text, primary_key=True) for each in (*keys, *GROUPED)),
        sa.Column("batch", sa.Boolean, primary_key=True),
        *_usage_columns(),
        sa.Column("num_requests", sa.BigInteger, nullable=False),
        sa.Column("num_embeddings", sa.BigInteger, nullable=False, server_default="0"),
    )


GROUPED = ("project", "key", "model", "tier")
usage_hourly = _rollup("usage_hourly", "hour")
usage_daily = _rollup("usage_daily", "day")
usage_tags_daily = _rollup("usage_tags_daily", "day", "tag", "value")

event_tags = sa.Table(
    "event_tags",
    metadata,
    sa.Column("event_id", sa.Text, primary_key=True),
    *text_columns("org"),
    sa.Column("tags", JSONB, nullable=False),
)

usage_tags = sa.Table(
    "usage_tags",
    metadata,
    sa.Column("org", sa.Text, primary_key=True),
    sa.Column("day", sa.TIMESTAMP(timezone=True), primary_key=True),
    *(sa.Column(name, sa.Text, primary_key=True) for name in ("tag", "value")),
)

usage_charges = sa.Table(
    "usage_charges",
    metadata,
    sa.Column("org", sa.Text, primary_key=True),
    sa.Column("hour", sa.TIMESTAMP(timezone=True), primary_key=True),
    *(sa.Column(each, sa.Text, primary_key=True) for each in ("project", "model", "tier")),
    sa.Column("price_set", sa.Uuid, primary_key=True),
    sa.Column("band", sa.BigInteger, primary_key=True),
    *_usage_columns(),
    *(sa.Column(name, sa.BigInteger, nullable=False) for name in REQUESTS),
)

accounts = sa.Table(
    "accounts", metadata, sa.Column("id", sa.Text, primary_key=True), *text_columns("kind")
)

transfers = sa.Table(
    "transfers",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("event_id", sa.Text, nullable=True),
    *text_columns("debit", "credit"),
    sa.Column("amount_pico", MONEY, nullable=False),
    *text_columns("kind"),
    sa.Column("phase", sa.Text, nullable=False),
    sa.Column("resolves", sa.Text, nullable=True),
    sa.Column("expires_at", sa.TIMESTAMP(timezone=True), nullable=True),
    sa.Column("corrects", sa.Text, nullable=True),
    _moment("admitted_at"),
    _moment("posted_at"),
    _seq(),
)

balances = sa.Table(
    "balances",
    metadata,
    sa.Column("account", sa.Text, primary_key=True),
    sa.Column("debits_pico", MONEY, nullable=False),
    sa.Column("credits_pico", MONEY, nullable=False),
    sa.Column("pending_debits_pico", MONEY, nullable=False),
    sa.Column("pending_credits_pico", MONEY, nullable=False),
)

alerts = sa.Table(
    "alerts",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    *text_columns("org_id", "scope", "scope_id", "measure", "cap_id", "period"),
    _moment("period_start"),
    sa.Column("threshold", sa.SmallInteger, nullable=False),
    sa.Column("ceiling", MONEY, nullable=False),
    sa.Column("used", MONEY, nullable=False),
    *text_columns("reason"),
    _moment("occurred_at"),
    sa.Column("dispatched_at", sa.TIMESTAMP(timezone=True), nullable=True),
)

spend_to_date = sa.Table(
    "spend_to_date",
    metadata,
    *(sa.Column(name, sa.Text, primary_key=True) for name in ("org_id", "scope", "scope_id")),
    sa.Column("period", sa.Text, primary_key=True),
    sa.Column("period_start", sa.TIMESTAMP(timezone=True), primary_key=True),
    sa.Column("spent_pico", MONEY, nullable=False),
)

ceiling_minutes = sa.Table(
    "ceiling_minutes",
    metadata,
    *(sa.Column(name, sa.Text, primary_key=True) for name in ("org_id", "scope", "scope_id")),
    sa.Column("measure", sa.Text, primary_key=True),
    sa.Column("minute", sa.TIMESTAMP(timezone=True), primary_key=True),
    sa.Column("used", sa.BigInteger, nullable=False),
)

credit_grants = sa.Table(
    "credit_grants",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    *text_columns("org_id"),
    sa.Column("amount_pico", MONEY, nullable=False),
    sa.Column("priority", sa.SmallInteger, nullable=False),
    sa.Column("expires_at", sa.TIMESTAMP(timezone=True), nullable=True),
    sa.Column("models", ARRAY(sa.Text), nullable=True),
    sa.Column("components", ARRAY(sa.Text), nullable=True),
    _moment("created_at"),
    sa.Column("revoked_at", sa.TIMESTAMP(timezone=True), nullable=True),
    sa.Column("ended_at", sa.TIMESTAMP(timezone=True), nullable=True),
)

credit_lines = sa.Table(
    "credit_lines",
    metadata,
    sa.Column("org_id", sa.Text, primary_key=True),
    *text_columns("account"),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("told", sa.BigInteger, nullable=False),
    sa.Column("paid_pico", MONEY, nullable=False),
    sa.Column("leased_until", sa.TIMESTAMP(timezone=True), nullable=True),
    sa.Column("leased_at", sa.TIMESTAMP(timezone=True), nullable=True),
    sa.Column("spent_pico", MONEY, nullable=False),
    sa.Column("is_low", sa.Boolean, nullable=False),
    sa.Column("dry_at_pico", MONEY, nullable=True),
    sa.Column("top_up_id", sa.Text, nullable=True),
    _moment("watched_at"),
)

balance_settings = sa.Table(
    "balance_settings",
    metadata,
    sa.Column("org_id", sa.Text, primary_key=True),
    sa.Column("low_pico", MONEY, nullable=True),
    sa.Column("top_up_pico", MONEY, nullable=True),
    sa.Column("top_up_below_pico", MONEY, nullable=True),
    sa.Column("top_ups_per_day", sa.SmallInteger, nullable=True),
)

top_ups = sa.Table(
    "top_ups",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    *text_columns("org_id"),
    sa.Column("amount_pico", MONEY, nullable=False),
    sa.Column("left_pico", MONEY, nullable=False),
    *text_columns("state"),
    _moment("requested_at"),
    _moment("expires_at"),
    sa.Column("ended_at", sa.TIMESTAMP(timezone=True), nullable=True),
    *text_columns("credit_id", "failure", "told", nullable=True),
)

credit_leases = sa.Table(
    "credit_leases",
    metadata,
    sa.Column("grant_id", sa.Text, primary_key=True),
    *text_columns("org_id", "transfer_id"),
)

unpaid_usage = sa.Table(
    "unpaid_usage",
    metadata,
    sa.Column("transfer_id", sa.Text, primary_key=True),
    *text_columns("org_id", "event_id"),
    sa.Column("amount_pico", MONEY, nullable=False),
)

credit_burns = sa.Table(
    "credit_burns",
    metadata,
    sa.Column("transfer_id", sa.Text, primary_key=True),
    sa.Column("grant_id", sa.Text, primary_key=True),
    *text_columns("org_id", "event_id"),
    sa.Column("version", sa.BigInteger, primary_key=True),
    sa.Column("amount_pico", MONEY, nullable=False),
)

reconciliations = sa.Table(
    "reconciliations",
    metadata,
    sa.Column("host", sa.Text, primary_key=True),
    sa.Column("day", sa.Date, primary_key=True),
    _moment("started_at"),
    sa.Column("ended_at", sa.TIMESTAMP(timezone=True), nullable=True),
    *(sa.Column(name, sa.ARRAY(sa.Text), nullable=False) for name in ("problems", "unknown")),
    sa.Column("num_waiting", sa.BigInteger, nullable=False),
)

cache_leases = sa.Table(
    "cache_leases",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    *text_columns("org_id", "event_id", "model", "engine", "engine_id", "ttl"),
    sa.Column("num_tokens", sa.BigInteger, nullable=False),
    sa.Column("end_tokens", sa.BigInteger, nullable=False),
    sa.Column("prefix", sa.LargeBinary, nullable=False),
    _moment("granted_at"),
    _moment("kept_until"),
    sa.Column("ended_at", sa.TIMESTAMP(timezone=True), nullable=True),
    *text_columns("outcome", "refund_id", nullable=True),
    sa.Column("refunded_pico", MONEY, nullable=True),
    sa.Column("refund_seq", sa.BigInteger, nullable=True),
)

cache_writes = sa.Table(
    "cache_writes",
    metadata,
    sa.Column("event_id", sa.Text, primary_key=True),
    *text_columns("org_id"),
    _moment("booked_at"),
)

superseded_requests = sa.Table(
    "superseded_requests",
    metadata,
    sa.Column("request_id", sa.Text, primary_key=True),
    *text_columns("org_id", "superseded_by"),
    _moment("claimed_at"),
    _moment("superseded_at"),
)
"""Requests that were repeated after their gateway died; their charges are reversed."""


def new_id_sql(prefix: str, later_ms: str = "0") -> str:
    """Return SQL that makes an id: the prefix and a new UUIDv7 (RFC 9562)."""
    return f"""
    '{prefix}' || lpad(to_hex(floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint
        + {later_ms}), 12, '0') || '7' || substr(replace(gen_random_uuid()::text, '-', ''), 14)
    """
