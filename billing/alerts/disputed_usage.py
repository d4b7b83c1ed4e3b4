"""Keep what upstreams claimed and nobody was billed for, and raise an alert of it: once a day and
model of an org.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import UnsetType
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.alerts.alerts import DISPUTED, RAISE, SPENT, WHOLE
from billing.events import DisputedUsage, UsageEvent
from billing.tables import disputed_usage, to_arrays, to_moment


class DisputeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Records what an upstream claimed of one attempt, beside what was billed of it; in tokens."""

    event_id: str
    request_id: str
    org: str
    model: str
    upstream: str
    """The replica's name: the model's and its position."""
    billed_tokens: int
    input_tokens: int
    """Claimed beyond what was billed, as is `output_tokens`."""
    output_tokens: int
    admitted_at: datetime


_COLUMNS = ", ".join(DisputeRecord.__struct_fields__)
_NOTE = sa.text(f"""
    WITH noted AS (
        SELECT * FROM unnest(CAST(:event_id AS text[]), CAST(:request_id AS text[]),
            CAST(:org AS text[]), CAST(:model AS text[]), CAST(:upstream AS text[]),
            CAST(:billed_tokens AS bigint[]), CAST(:input_tokens AS bigint[]),
            CAST(:output_tokens AS bigint[]), CAST(:admitted_at AS timestamptz[]))
            AS n({_COLUMNS})
    ),
    kept AS (
        INSERT INTO disputed_usage ({_COLUMNS}) SELECT {_COLUMNS} FROM noted ORDER BY event_id
        ON CONFLICT DO NOTHING
    ),
    worst AS (
        SELECT DISTINCT ON (org, model, day) *
        FROM (
            SELECT *, date_trunc('day', admitted_at, 'UTC') AS day,
                CAST(billed_tokens AS numeric) + input_tokens + output_tokens AS claimed
            FROM noted
        ) d ORDER BY org, model, day, claimed DESC
    ),
    reached AS (
        SELECT org AS org_id, 'model' AS scope, model AS scope_id, '{DISPUTED}' AS measure,
            '' AS cap_id, 'day' AS period, day AS period_start, billed_tokens AS ceiling,
            claimed AS used, '{SPENT}' AS reason
        FROM worst
    )
    {RAISE}
""")


async def note_disputed(connection: AsyncConnection, events: Sequence[UsageEvent]) -> None:
    """Keep the disputed usage of events that this transaction has inserted, and raise its
    alerts."""
    records = [
        _to_record(each, each.disputed)
        for each in events
        if not isinstance(each.disputed, UnsetType)
    ]
    if records:
        named = to_arrays(DisputeRecord, records)
        await connection.execute(_NOTE, {**named, "thresholds": [WHOLE]})


def _to_record(event: UsageEvent, disputed: DisputedUsage) -> DisputeRecord:
    attempt = event.attempt
    return DisputeRecord(
        event_id=event.id,
        request_id=attempt.request_id,
        org=attempt.org,
        model=attempt.model,
        upstream=disputed.upstream,
        billed_tokens=event.quantities.total,
        input_tokens=disputed.input_tokens,
        output_tokens=disputed.output_tokens,
        admitted_at=to_moment(attempt.admitted_at),
    )


def select_disputed(org_id: str) -> sa.Select[Any]:
    return sa.select(disputed_usage).where(disputed_usage.c.org == org_id)
