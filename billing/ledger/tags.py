"""Sum up usage by day and tag, beside the daily sums of all usage.

An event with n tags is in the sums of n tags. An org has at most MAX_A_DAY different tags a day:
beyond that a value is counted as OTHER, and so is a key that is new that day. A tag with a budget
is always counted by its name. The caller holds the lock of the org's balance or of the books, so
that concurrent transactions see each other's tags.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import UnsetType
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.events import COMPONENTS, Attempt, Quantities, Tags, UsageEvent
from billing.ledger.accounts import USAGE_SUMS, add_to
from billing.money import Pico
from billing.pricing.rating import rate
from billing.tables import (
    EPOCH,
    GROUPED,
    TOTAL_PICO,
    amount_column,
    columns_of,
    event_tags,
    read_struct,
    sums_of,
    to_moment,
)

MAX_TAGS = 8
"""A request has at most so many tags."""
MAX_KEY_CHARS, MAX_VALUE_CHARS = 32, 64
KEY_PATTERN = rf"[a-z][a-z0-9_.-]{{0,{MAX_KEY_CHARS - 1}}}"
VALUE_PATTERN = rf"[A-Za-z0-9_.:/@+-]{{1,{MAX_VALUE_CHARS}}}"
_TAG = re.compile(rf"({KEY_PATTERN})=({VALUE_PATTERN})")
MAX_A_DAY = 1000
"""An org has at most so many different tags a day."""
OTHER = "(other)"
"""A value that matches no pattern of tags, so no client can send it."""
DAY_S = 86_400


def to_tag(text: str) -> tuple[str, str] | None:
    """Parse `key=value`. None: it is not a tag."""
    found = _TAG.fullmatch(text)
    return None if found is None else (found[1], found[2])


def tags_of(attempt: Attempt) -> Tags:
    return {} if isinstance(attempt.tags, UnsetType) else attempt.tags


class TagSpend(msgspec.Struct, frozen=True):
    """The amount booked for a tag (`key=value`) in one day (UTC) of admission."""

    org: str
    tag: str
    day: int
    amount_pico: int


class TaggedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The quantities and amounts that one event adds to the sums of its tags."""

    org: str
    day: int
    """Days from 1970 to its admission."""
    group: tuple[str, str, str, str, bool]
    """Project, key, model, tier, and whether it came in a batch."""
    tags: Mapping[str, str]
    quantities: Quantities = Quantities()
    num_requests: int = 0
    amounts: Mapping[str, Pico]
    """Pico-USD by component."""


def of_event(event: UsageEvent) -> TaggedEvent:
    attempt = event.attempt
    rated = rate(event.quantities, attempt.prices)
    return TaggedEvent(
        org=attempt.org,
        day=(to_moment(attempt.admitted_at) - EPOCH).days,
        group=(
            *(attempt.project, attempt.key, attempt.model, attempt.tier),
            attempt.lane == "batch",
        ),
        tags=tags_of(attempt),
        quantities=event.quantities,
        num_requests=1,
        amounts={str(line.component): line.amount_pico for line in rated.lines},
    )


_OF_TAG = ("org", "day", "tag", "value")
_KEY = (*_OF_TAG, *GROUPED, "batch")


def _is_same_tag(one: str, other: str) -> str:
    return " AND ".join(f"{one}.{name} = {other}.{name}" for name in _OF_TAG)


_ADD = sa.text(f"""
    WITH incoming AS (
        SELECT org, to_timestamp(day * {DAY_S}) AS day, tag, value, {", ".join(GROUPED)}, batch,
            {", ".join(f"coalesce({name}, 0) AS {name}" for name in USAGE_SUMS)}
        FROM json_to_recordset(CAST(:batch AS json)) AS t(org text, day bigint, tag text,
            value text, {", ".join(f"{name} text" for name in GROUPED)}, batch boolean,
            {", ".join(f"{name} numeric" for name in USAGE_SUMS)})
    ),
    named AS (SELECT DISTINCT {", ".join(_OF_TAG)} FROM incoming),
    standing AS (SELECT k.* FROM usage_tags k JOIN named USING ({", ".join(_OF_TAG)})),
    capped AS (
        SELECT DISTINCT org_id, tag FROM spend_caps WHERE tag IS NOT NULL AND archived_at IS NULL
    ),
    fresh AS (
        SELECT n.*, c.tag IS NOT NULL AS is_capped,
            (SELECT count(*) FROM usage_tags k WHERE k.org = n.org AND k.day = n.day)
            + row_number() OVER (PARTITION BY n.org, n.day ORDER BY n.tag, n.value) AS place
        FROM named n LEFT JOIN capped c ON c.org_id = n.org AND c.tag = n.tag || '=' || n.value
        WHERE NOT EXISTS (SELECT FROM standing s WHERE {_is_same_tag("s", "n")})
    ),
    added AS (
        INSERT INTO usage_tags ({", ".join(_OF_TAG)})
        SELECT {", ".join(_OF_TAG)} FROM fresh
        WHERE NOT CAST(:corrects AS boolean) AND (is_capped OR place <= :most)
        ORDER BY {", ".join(_OF_TAG)} RETURNING *
    ),
    known AS (SELECT * FROM standing UNION ALL SELECT * FROM added),
    keys AS (
        SELECT DISTINCT k.org, k.day, k.tag FROM usage_tags k JOIN named USING (org, day, tag)
        UNION SELECT org, day, tag FROM added
    ),
    counted AS (
        SELECT i.org, i.day, CASE WHEN keys.tag IS NULL THEN '{OTHER}' ELSE i.tag END AS tag,
            CASE WHEN known.value IS NULL THEN '{OTHER}' ELSE i.value END AS value,
            {columns_of("i", (*GROUPED, "batch", *USAGE_SUMS))}
        FROM incoming i LEFT JOIN known ON {_is_same_tag("known", "i")}
            LEFT JOIN keys ON (keys.org, keys.day, keys.tag) = (i.org, i.day, i.tag)
    ),
    grown AS (
        INSERT INTO usage_tags_daily AS r ({", ".join((*_KEY, *USAGE_SUMS))})
        SELECT {", ".join(_KEY)}, {sums_of(USAGE_SUMS)} FROM counted
        GROUP BY {", ".join(_KEY)} ORDER BY {", ".join(_KEY)}
        ON CONFLICT ({", ".join(_KEY)}) DO UPDATE SET {add_to(USAGE_SUMS)}
    )
    SELECT org, tag || '=' || value AS tag,
        CAST(extract(epoch FROM day) AS bigint) / {DAY_S} AS day, sum({TOTAL_PICO}) AS amount_pico
    FROM counted WHERE value <> '{OTHER}' GROUP BY 1, 2, 3 HAVING sum({TOTAL_PICO}) <> 0
""")


async def book_tagged(conn: AsyncConnection, events: Sequence[UsageEvent]) -> list[TagSpend]:
    """Add events that this transaction has inserted to the sums of their tags; return as
    `add_tagged`."""
    if not events:
        return []
    rows = [
        {"event_id": each.id, "org": each.attempt.org, "tags": tags_of(each.attempt)}
        for each in events
    ]
    await conn.execute(sa.insert(event_tags), rows)
    used = [of_event(each) for each in events if each.kind == "usage"]
    counted = [each for each in used if any(msgspec.structs.astuple(each.quantities))]
    return await add_tagged(conn, counted)


async def add_tagged(
    conn: AsyncConnection, events: Sequence[TaggedEvent], *, corrects: bool = False
) -> list[TagSpend]:
    """Add to the sums of tags, after booking `events` in the same transaction. Return the amounts
    of the tags that are counted by their names. `corrects`: the events were counted before, so a
    tag that is counted as OTHER stays there."""
    if not events:
        return []
    batch = msgspec.json.encode(_rows(events)).decode()
    named = {"batch": batch, "most": MAX_A_DAY, "corrects": corrects}
    grown = await conn.execute(_ADD, named)
    return [read_struct(TagSpend, row) for row in grown]


def _rows(events: Iterable[TaggedEvent]) -> list[dict[str, Any]]:
    """Return a row for each tag and group. Money is text: it may exceed 64 bits."""
    sums: dict[tuple[Any, ...], dict[str, int]] = {}
    for event in events:
        counts = _counts(event)
        for tag, value in event.tags.items():
            total = sums.setdefault((event.org, event.day, tag, value, *event.group), {})
            for name, number in counts.items():
                total[name] = total.get(name, 0) + number
    return [
        dict(zip(_KEY, key, strict=True)) | {name: str(each) for name, each in total.items()}
        for key, total in sums.items()
    ]


def _counts(event: TaggedEvent) -> dict[str, int]:
    counts: dict[str, int] = {
        name: count for name in COMPONENTS if (count := getattr(event.quantities, name))
    }
    counts["num_requests"] = event.num_requests
    counts["num_embeddings"] = event.num_requests if event.quantities.embedding_input else 0
    counts.update((amount_column(name), amount) for name, amount in event.amounts.items())
    return counts
