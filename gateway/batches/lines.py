"""Leases lines, puts them off, and ends them together with what they used. A lease is a bounded
time in which one gateway may work on a line; it is renewed while that gateway lives. `end` is the
one place where a line ends and its usage is booked: one transaction, in which the line must still
be its holder's. So a line is answered and billed once, or neither; what an attempt used that lost
its lease, or whose gateway died, is the house's waste."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.events import UsageEvent
from billing.ingestion.ingest import ingest_within
from gateway.batches.sealing import ANSWERS, REQUESTS
from gateway.batches.states import LineState
from gateway.columns import UNREADABLE
from gateway.ids import uuid7_hex
from gateway.inference.calls import REQUEST_PREFIX
from gateway.secret import Cipher

log = logging.getLogger(__name__)

MAX_ENDED_AT_ONCE = 200


class LeasedLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line with what its holder needs to run it."""

    batch_id: str
    number: int
    org_id: str
    project_id: str
    key_id: str
    endpoint: str
    tags: dict[str, str] | None
    traceparent: str | None
    """The span of the request that made its batch; None: it is in no trace."""
    custom_id: str
    body: bytes
    is_readable: bool = True
    """False if its body does not open any more."""
    losses: int
    """How often it was begun and lost by us."""
    request_id: str
    """The request id of this attempt."""
    lost_request_id: str | None
    """The request id of the attempt before, if its worker is gone: its reservation must be voided.
    """

    @property
    def place(self) -> tuple[str, int]:
        return self.batch_id, self.number


class EndedLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line that has ended. `events`: what it used; none if it failed. `error_code`: that of its
    answer; empty if it did not fail."""

    line: LeasedLine
    state: LineState
    request_id: str
    status: int
    answer: bytes
    events: tuple[UsageEvent, ...] = ()
    error_code: str = ""

    @property
    def event(self) -> UsageEvent | None:
        """Return the event that bills it."""
        return next((each for each in self.events if each.kind == "usage"), None)


LineLog = Callable[[AsyncConnection, Sequence[EndedLine]], Awaitable[None]]
"""Writes the rows of ended lines. Raises nothing but what a lost connection raises."""

_LEASE = sa.text("""
    WITH open AS (
        SELECT b.id, b.org_id, l.number, l.due_at
        FROM batches b CROSS JOIN LATERAL (
            SELECT number, due_at FROM batch_lines
            WHERE batch_id = b.id AND state = 'open' AND due_at <= now()
                AND (leased_until IS NULL OR leased_until <= now())
            ORDER BY number LIMIT :limit
        ) l
        WHERE b.status = 'in_progress' AND b.expires_at > now() AND NOT EXISTS (
            SELECT FROM unnest(CAST(:excluded_orgs AS text[]), CAST(:excluded_models AS text[]))
                AS c(org_id, model)
            WHERE (c.org_id, c.model) = (b.org_id, b.model)
        )
    ),
    ranked AS (
        SELECT id, number, row_number() OVER (PARTITION BY org_id ORDER BY due_at, id, number)
            + (SELECT count(*) FROM unnest(CAST(:orgs AS text[])) o WHERE o = org_id) AS place
        FROM open
    ),
    locked AS (
        SELECT l.batch_id, l.number, l.request_id FROM batch_lines l JOIN ranked r
            ON l.batch_id = r.id AND l.number = r.number
        WHERE l.state = 'open' AND (l.leased_until IS NULL OR l.leased_until <= now())
        ORDER BY r.place, l.batch_id, l.number LIMIT :limit
        FOR UPDATE OF l SKIP LOCKED
    ),
    named AS (SELECT *, row_number() OVER (ORDER BY batch_id, number) AS place FROM locked)
    UPDATE batch_lines l
    SET leased_by = :holder, leased_until = now() + make_interval(secs => :lease_s),
        request_id = (CAST(:request_ids AS text[]))[named.place]
    FROM named, batches b
    WHERE l.batch_id = named.batch_id AND l.number = named.number AND b.id = l.batch_id
        AND b.status = 'in_progress'
    RETURNING l.batch_id, l.number, l.org_id, b.project_id, b.key_id, b.endpoint, b.tags,
        b.traceparent, l.custom_id, l.body, l.secret_id, l.losses, l.request_id,
        named.request_id AS lost_request_id
""")
_PLACES = """
    FROM unnest(CAST(:batch_ids AS text[]), CAST(:numbers AS integer[])) AS p(batch_id, number)
    WHERE l.batch_id = p.batch_id AND l.number = p.number AND l.state = 'open'
        AND l.leased_by = :holder
"""
_RENEW = sa.text(f"""
    UPDATE batch_lines l SET leased_until = now() + make_interval(secs => :lease_s) {_PLACES}
""")
_PUT_OFF = sa.text(f"""
    UPDATE batch_lines l
    SET leased_by = NULL, leased_until = NULL, request_id = NULL, losses = l.losses + :losses,
        due_at = now() + make_interval(secs => :delay_s) {_PLACES}
""")
_HOLD = sa.text("""
    SELECT l.batch_id, l.number FROM batch_lines l
    JOIN unnest(CAST(:batch_ids AS text[]), CAST(:numbers AS integer[])) AS p(batch_id, number)
        ON l.batch_id = p.batch_id AND l.number = p.number
    WHERE l.state = 'open' AND l.leased_by = :holder
    ORDER BY 1, 2 FOR UPDATE OF l
""")
_END = sa.text("""
    UPDATE batch_lines SET state = :state, leased_by = NULL, leased_until = NULL, body = '',
        request_id = :request_id, event_id = :event_id, status = :status, answer = :answer,
        answer_secret_id = :answer_secret_id
    WHERE batch_id = :batch_id AND number = :number
""")
_COUNT = sa.text("""
    UPDATE batches SET num_completed = num_completed + :completed,
        num_failed = num_failed + :failed, input_tokens = input_tokens + :input,
        cached_tokens = cached_tokens + :cached, output_tokens = output_tokens + :output,
        reasoning_tokens = reasoning_tokens + :reasoning
    WHERE id = :batch_id
""")


async def lease(
    db: AsyncEngine,
    cipher: Cipher,
    holder: str,
    *,
    limit: int,
    under_way: Iterable[LeasedLine],
    lease_s: float,
    excluded: Collection[tuple[str, str]] = (),
) -> list[LeasedLine]:
    """Lease the next lines, in their orgs' turns. `cipher`: for the purpose of batches. `excluded`:
    orgs with models of which nothing is run; lines of a batch of several models are leased all the
    same."""
    named: dict[str, Any] = {"holder": holder, "limit": limit, "lease_s": lease_s}
    named["orgs"] = [each.org_id for each in under_way]
    named["excluded_orgs"] = [org_id for org_id, _ in excluded]
    named["excluded_models"] = [model for _, model in excluded]
    named["request_ids"] = [f"{REQUEST_PREFIX}{uuid7_hex()}" for _ in range(limit)]
    async with db.begin() as conn:
        rows = (await conn.execute(_LEASE, named)).all()
    return [_open(cipher, dict(row._mapping)) for row in rows]


def _open(cipher: Cipher, row: dict[str, Any]) -> LeasedLine:
    """Open a line; who cannot read it any more ends it, so that it holds up no other."""
    try:
        plain = REQUESTS.open(cipher, row)
    except UNREADABLE as error:
        log.error("line %s of %s does not open: %r", row["number"], row["batch_id"], error)
        plain = {"custom_id": "", "body": b"", "is_readable": False}
    del row["secret_id"]
    return LeasedLine(**{**row, **plain})


async def renew(
    db: AsyncEngine, holder: str, lines: Collection[LeasedLine], *, lease_s: float
) -> None:
    async with db.begin() as conn:
        await conn.execute(_RENEW, {**_named(holder, lines), "lease_s": lease_s})


async def put_off(
    db: AsyncEngine, holder: str, line: LeasedLine, *, delay_s: float, is_loss: bool
) -> None:
    """Let anybody try a line again later. `is_loss`: it had begun."""
    named = {**_named(holder, [line]), "delay_s": delay_s, "losses": int(is_loss)}
    async with db.begin() as conn:
        await conn.execute(_PUT_OFF, named)


async def end(
    db: AsyncEngine, cipher: Cipher, holder: str, ended: Sequence[EndedLine], log: LineLog
) -> list[EndedLine]:
    """End lines in one transaction with what they used and their rows in the request log; return
    those that were still this holder's. Raises: what `ingest_within` raises; then nothing has
    happened."""
    assert len(ended) <= MAX_ENDED_AT_ONCE
    async with db.begin() as conn:
        held = await conn.execute(_HOLD, _named(holder, [each.line for each in ended]))
        mine = {(row.batch_id, row.number) for row in held}
        kept = [each for each in ended if each.line.place in mine]
        await ingest_within(conn, [event for each in kept for event in each.events])
        if kept:
            await conn.execute(_END, [_row(cipher, each) for each in kept])
            await log(conn, kept)
        await _count(conn, kept)
    return kept


async def _count(conn: AsyncConnection, kept: Sequence[EndedLine]) -> None:
    """Count lines in the order of batches, as everybody does, so that nobody deadlocks."""
    by_batch: defaultdict[str, list[EndedLine]] = defaultdict(list)
    for each in kept:
        by_batch[each.line.batch_id].append(each)
    for batch_id, lines in sorted(by_batch.items()):
        used = [each.event.quantities for each in lines if each.event is not None]
        await conn.execute(
            _COUNT,
            {
                "batch_id": batch_id,
                "completed": sum(each.state == "done" for each in lines),
                "failed": sum(each.state == "failed" for each in lines),
                "input": sum(it.input_total for it in used),
                "cached": sum(it.cache_read for it in used),
                "output": sum(it.output_total for it in used),
                "reasoning": sum(it.reasoning_output for it in used),
            },
        )


def _row(cipher: Cipher, ended: EndedLine) -> dict[str, Any]:
    line, event = ended.line, ended.event
    place = {"org_id": line.org_id, "batch_id": line.batch_id, "number": line.number}
    return {
        "batch_id": line.batch_id,
        "number": line.number,
        "state": ended.state,
        "request_id": ended.request_id,
        "event_id": None if event is None else event.id,
        "status": ended.status,
        **ANSWERS.seal(cipher, {**place, "answer": ended.answer}),
    }


def _named(holder: str, lines: Iterable[LeasedLine]) -> dict[str, Any]:
    places = [each.place for each in lines]
    return {
        "holder": holder,
        "batch_ids": [batch_id for batch_id, _ in places],
        "numbers": [number for _, number in places],
    }
