"""Decide on quarantined records of a spool: what is known of one, what its acceptance bills, and
what its disposal writes off.

Both verdicts book events by the attempt's own id, or by one made of it, so a repeat books nothing
again, and what is in the books already stays as it is.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.events import Quantities, UsageEvent
from billing.ingestion.ingest import ingest_within
from billing.ingestion.settle_late import waste_id
from billing.spool.damage import Claim, read_claims
from billing.spool.format import OpenAttempt, OpenRecord, SegmentStart
from billing.spool.quarantine import QuarantinedRecord
from billing.tables import usage_events

Verdict = Literal["accept", "discard"]


class KnownUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what is known of a quarantined record."""

    requests: tuple[str, ...]
    """The requests that it is about, or one of which it may be about."""
    org: str | None
    project: str | None
    model: str | None
    events: tuple[UsageEvent, ...]
    """Its acceptance bills these."""
    is_verified: bool
    """True if whole records say so; else the damaged bytes do."""

    @property
    def quantities(self) -> Quantities | None:
        """The usage of the first event, if any is known."""
        return self.events[0].quantities if self.events else None


def known_usage(entry: QuarantinedRecord) -> KnownUsage:
    claims = read_claims(entry.data)
    events, is_verified = _events(entry, claims)
    attempts = [event.attempt for event in events]
    claimed = [(it.org, it.project, it.model) for it in claims]
    whole = [(it.org, it.project, it.model) for it in attempts]
    org, project, model = next(iter([*whole, *claimed]), (None, None, None))
    requests = {it.request_id for it in attempts} or {*entry.context.candidates}
    requests = requests or {request for claim in claims for request in claim.requests}
    return KnownUsage(
        requests=tuple(sorted(requests)),
        org=org,
        project=project,
        model=model,
        events=tuple(events),
        is_verified=is_verified,
    )


def _events(entry: QuarantinedRecord, claims: list[Claim]) -> tuple[list[UsageEvent], bool]:
    """Return what the entry would bill, and whether whole records say so."""
    attempt, checkpoint = entry.context.attempt, entry.context.checkpoint
    claimed = [claim.event for claim in claims if claim.event is not None]
    if entry.context.reason == "refused":
        return claimed, True
    if attempt is not None:
        own = [it for it in claimed if it.id == attempt.attempt.id]
        if own and not attempt.has_usage:
            return [msgspec.structs.replace(own[0], attempt=attempt.attempt, estimated=True)], False
        return [attempt.recovered()], True
    records = [claim.record for claim in claims]
    if checkpoint is not None:
        opened = [it.attempt for it in records if isinstance(it, OpenRecord)]
        opened = [it for it in opened if it.id == checkpoint.attempt_id]
        return [OpenAttempt(it, checkpoint).recovered() for it in opened], False
    carried = [each for it in records if isinstance(it, SegmentStart) for each in it.open]
    recovered = [each.recovered() for each in carried if each.has_usage]
    return [*(msgspec.structs.replace(it, estimated=True) for it in claimed), *recovered], False


def to_book(known: KnownUsage, verdict: Verdict) -> list[UsageEvent]:
    """Return the events that a verdict books: the usage itself, or as waste, for which the house
    pays."""
    if verdict == "accept":
        return [*known.events]
    return [
        msgspec.structs.replace(
            it, attempt=msgspec.structs.replace(it.attempt, id=waste_id(it.id)), kind="waste"
        )
        for it in known.events
        if it.quantities.total
    ]


async def book(
    connection: AsyncConnection, known: KnownUsage, verdict: Verdict
) -> list[UsageEvent]:
    """Book what a verdict says, in the caller's transaction. Return the events that were not in the
    books: none where the attempt itself is.

    Raises: as `ingest`.
    """
    ids = [event.id for event in known.events]
    query = sa.select(usage_events.c.id).where(usage_events.c.id.in_(ids))
    booked = set((await connection.scalars(query)).all())
    left = msgspec.structs.replace(
        known, events=tuple(it for it in known.events if it.id not in booked)
    )
    events = to_book(left, verdict)
    await ingest_within(connection, events)
    return events


def describe(entry: QuarantinedRecord) -> str:
    """Return one line that says what is known of an entry."""
    known = known_usage(entry)
    named = [
        f"{what} {value}"
        for what, value in (
            ("request", " or ".join(known.requests) or "unknown"),
            ("project", known.project or "unknown"),
            ("organization", known.org),
            ("model", known.model),
        )
        if value is not None
    ]
    return f"{', '.join(named)}: {describe_usage(known)}"


def describe_usage(known: KnownUsage) -> str:
    used = known.quantities
    if used is None:
        return "its usage is not known"
    source = "by whole records" if known.is_verified else "by damaged bytes, not verified"
    calls = f", {used.tool_call} calls" if used.tool_call else ""
    return f"{used.input_total} input and {used.output_total} output tokens{calls} {source}"
