"""Reconcile engines, spools, ledger, rollups and invoices, and find the first request that differs.

    tokens that engines generated = billed tokens + the house's waste, in the books or a spool

Everything may run meanwhile: engines are counted before and after, and what they count as
acknowledged was on a gateway's disk by then. So the tokens in the books and spools lie between the
two counts, and equal them while nothing runs. Knows no engine, only their counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar
from uuid import UUID

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.events import INPUTS, OUTPUTS, UsageEvent, failover_waste_id, stop_waste_id
from billing.ingestion.ingest import digest
from billing.ingestion.quarantined import describe, known_usage
from billing.ingestion.settle_late import house_waste_id, waste_id
from billing.ledger import accounts as ledger
from billing.reconciliation.checks import check_all
from billing.spool.directory import UnexaminedDamage, read_spool
from billing.spool.quarantine import Context, Quarantine, QuarantinedRecord
from billing.tables import to_moment

T = TypeVar("T")
CHUNK = 1000


class Tokens(NamedTuple):
    prompt: int = 0
    generated: int = 0

    def plus(self, other: Tokens) -> Tokens:
        return Tokens(self.prompt + other.prompt, self.generated + other.generated)


class EngineCount(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of one engine over a span of time."""

    name: str
    models: frozenset[str]
    """The names under which it is sold."""
    since: float
    until: float | None
    """Unix seconds; None: it is still counting."""
    is_lost: bool
    """True if its machine failed, so that the count may be too high or too low."""
    acknowledged: Tokens
    open: dict[str, Tokens]
    """Attempts that are not acknowledged yet."""
    recent: dict[str, Tokens]
    """Some of the attempts that were acknowledged last."""
    shares_books: bool = False
    """Other engines than those here are in the same books by its name, and some of what it counts
    may yet be in a spool elsewhere: attempts that the books have are compared, and no totals."""


class Agreement(msgspec.Struct, kw_only=True):
    """The result of a reconciliation."""

    problems: list[str] = []
    """Each kind begins with the first request, account or hour that differs."""
    unknown: list[str] = []
    """Differences that cannot be explained any more, such as a count lost in a power failure."""
    num_waiting: int = 0
    """The number of events that are in spools alone."""
    num_quarantined: int = 0
    """The number of records of spools that wait for a person."""

    @property
    def first(self) -> str | None:
        """The problem to look at first: one that names a request, if there is one."""
        named = (problem for problem in self.problems if "request " in problem)
        return next(named, self.problems[0] if self.problems else None)


class SpooledEvent(NamedTuple):
    """An event that is in a spool alone."""

    model: str
    admitted_at: float
    tokens: Tokens


async def agree(
    db: AsyncEngine, spools: Path, engines: Callable[[], Sequence[EngineCount]]
) -> Agreement:
    """Compare all counts and run all checks. `db`: of a role that sees every org's rows.

    Raises: SQLAlchemyError, OSError.
    """
    found = Agreement()
    before = engines()
    waiting = await _compare_spools(db, spools, found.problems)
    found.num_waiting = len(waiting)
    _name_quarantined(spools, found)
    damaged = _DamagedUsage.read(spools)
    async with db.connect() as connection:
        await connection.execution_options(isolation_level="REPEATABLE READ")
        arrived = await _known(connection, list(waiting))
        still = [it for event_id, it in waiting.items() if event_id not in arrived]
        booked = [await _booked(connection, count, still) for count in before]
        after = {(count.name, count.since): count for count in engines()}
        for count, total in zip(before, booked, strict=True):
            later = after.get((count.name, count.since), count)
            if not count.shares_books:
                _compare_totals(count, later, total, found, damaged)
            await _compare_requests(connection, count, later, waiting, found, damaged)
    found.problems += await check_all(db)
    return found


async def _compare_spools(
    db: AsyncEngine, spools: Path, problems: list[str]
) -> dict[str, SpooledEvent]:
    """Compare closed events with the books; return those that are in spools alone, by id."""
    waiting: dict[str, SpooledEvent] = {}
    for chunk in _chunks(_closed_events(spools, problems)):
        async with db.connect() as connection:
            standing = await _known(connection, [event.id for event, _ in chunk])
        for event, shipped in chunk:
            if event.id not in standing:
                if shipped:
                    problems.append(f"{_name(event)}: its spool has shipped it, the books lack it")
                else:
                    waiting[event.id] = _to_waiting(event)
            elif standing[event.id] != digest(event) and event.finish != "recovered":
                problems.append(f"{_name(event)}: its spool and the books have other content")
    return waiting


def _closed_events(spools: Path, problems: list[str]) -> Iterator[tuple[UsageEvent, bool]]:
    """Yield the closed events of all spools; name damage that no gateway has examined."""
    for lock in sorted(spools.glob("*/lock")):
        for found in read_spool(lock.parent):
            if isinstance(found, UnexaminedDamage):
                where = f"{found.spool}/{found.span.segment:08d}.log at {found.span.start}"
                entry = QuarantinedRecord(where, found.span.data, Context(reason="damaged"))
                problems.append(f"damaged spool record {where}: {describe(entry)}")
            else:
                yield found


def _name_quarantined(spools: Path, found: Agreement) -> None:
    """Report each record of a spool that waits for a person."""
    for entry in Quarantine(spools).entries():
        found.num_quarantined += 1
        found.problems.append(f"quarantined spool record {entry.name}: {describe(entry)}")


class _DamagedUsage(NamedTuple):
    """Usage whose record was damaged: an engine may have counted more than could be billed."""

    attempts: frozenset[str]
    entries: tuple[tuple[str | None, float | None], ...]
    """The model and the admission of each, as far as they are known."""

    @classmethod
    def read(cls, spools: Path) -> _DamagedUsage:
        attempts, entries = set[str](), list[tuple[str | None, float | None]]()
        for entry in Quarantine(spools).entries(resolved=True):
            if entry.context.outcome == "nothing_lost":
                continue
            known = known_usage(entry)
            attempts |= {event.id for event in known.events}
            moments = [event.attempt.admitted_at for event in known.events]
            entries.append((known.model, moments[0] if moments else None))
        return cls(frozenset(attempts), tuple(entries))

    def count_of(self, engine: EngineCount) -> int:
        """Return how many records may be of an engine."""
        until = engine.until or float("inf")
        return sum(
            (model is None or model in engine.models) and (at is None or engine.since <= at < until)
            for model, at in self.entries
        )


def _compare_totals(
    before: EngineCount,
    after: EngineCount,
    booked: Tokens,
    found: Agreement,
    damaged: _DamagedUsage,
) -> None:
    most = after.acknowledged
    for tokens in after.open.values():
        most = most.plus(tokens)
    for what, least, total, limit in zip(
        Tokens._fields, before.acknowledged, booked, most, strict=True
    ):
        if least <= total <= limit:
            continue
        beside = f"{least} to {limit}" if least != limit else str(limit)
        line = f"engine {before.name}: {beside} {what} tokens, and {total} in the books and spools"
        if before.is_lost:
            found.unknown.append(f"{line}: its count was lost with its machine's memory")
        elif total < least and (number := damaged.count_of(before)):
            found.unknown.append(f"{line}: {number} of its records in a spool were damaged")
        else:
            found.problems.append(line)


async def _compare_requests(
    connection: AsyncConnection,
    before: EngineCount,
    after: EngineCount,
    waiting: dict[str, SpooledEvent],
    found: Agreement,
    damaged: _DamagedUsage,
) -> None:
    """Report the first request that differs, of those that the engine still counts by itself."""
    settled = (it for it in sorted(before.recent.items()) if after.recent.get(it[0]) == it[1])
    for chunk in _chunks(settled):
        parts = {attempt: _events_of(attempt) for attempt, _ in chunk}
        rows = await _tokens_of(connection, [each for ids in parts.values() for each in ids])
        for attempt, generated in chunk:
            booked = Tokens()
            for event_id in parts[attempt]:
                if event_id in rows:
                    booked = booked.plus(rows[event_id][1])
                elif event_id in waiting:
                    booked = booked.plus(waiting[event_id].tokens)
            if booked != generated and not (before.shares_books and booked == Tokens()):
                request = rows[attempt][0] if attempt in rows else "unknown"
                line = (
                    f"request {request}, event {attempt}: engine {before.name} counts "
                    f"{generated.prompt} + {generated.generated} tokens, "
                    f"the books {booked.prompt} + {booked.generated}"
                )
                if attempt in damaged.attempts:
                    found.unknown.append(f"{line}: its record in a spool was damaged")
                    continue
                found.problems.append(line)
                return


def _events_of(attempt: str) -> list[str]:
    """Return the ids of the events that may have an attempt's tokens."""
    try:
        beside = [each(str(UUID(attempt))) for each in (stop_waste_id, failover_waste_id)]
    except ValueError:
        beside = []
    return [attempt, waste_id(attempt), house_waste_id(attempt), *beside]


# Waste that was reversed is booked with another event.
_REVERSED = f"""
    EXISTS (SELECT FROM transfers t JOIN transfers r ON r.corrects = t.id
        WHERE {ledger.transfers_of("u.id")} AND r.kind = 'reversed')
"""
_TOKENS = f"{' + '.join(INPUTS)} AS prompt, {' + '.join(OUTPUTS)} AS generated"
_SUMS = sa.text(f"""
    SELECT coalesce(sum(prompt), 0) AS prompt, coalesce(sum(generated), 0) AS generated FROM (
        SELECT {_TOKENS} FROM usage_events u
        WHERE model = ANY(CAST(:models AS text[])) AND admitted_at >= :since
            AND (CAST(:until AS timestamptz) IS NULL OR admitted_at < :until)
            AND (kind = 'usage' OR NOT {_REVERSED})
    ) s
""")
_EACH = sa.text(f"""
    SELECT id, request_id, {_TOKENS} FROM usage_events u
    WHERE id = ANY(CAST(:ids AS text[])) AND (kind = 'usage' OR NOT {_REVERSED})
""")
_KNOWN = sa.text("SELECT id, digest FROM usage_events WHERE id = ANY(CAST(:ids AS text[]))")


async def _booked(
    connection: AsyncConnection, count: EngineCount, waiting: Iterable[SpooledEvent]
) -> Tokens:
    """Add up an engine's tokens in the books and in spools."""
    until = None if count.until is None else to_moment(count.until)
    bounds = {"since": to_moment(count.since), "until": until, "models": sorted(count.models)}
    row = (await connection.execute(_SUMS, bounds)).one()
    total = Tokens(int(row.prompt), int(row.generated))
    for it in waiting:
        in_time = it.admitted_at >= count.since and it.admitted_at < (count.until or 1e18)
        if in_time and it.model in count.models:
            total = total.plus(it.tokens)
    return total


async def _tokens_of(
    connection: AsyncConnection, ids: Sequence[str]
) -> dict[str, tuple[str, Tokens]]:
    rows = await connection.execute(_EACH, {"ids": list(ids)})
    return {it.id: (it.request_id, Tokens(int(it.prompt), int(it.generated))) for it in rows}


async def _known(connection: AsyncConnection, ids: Sequence[str]) -> dict[str, bytes]:
    """Return the digests of the events that are in the books."""
    known: dict[str, bytes] = {}
    for chunk in _chunks(ids):
        rows = await connection.execute(_KNOWN, {"ids": chunk})
        known.update((row.id, row.digest) for row in rows)
    return known


def _to_waiting(event: UsageEvent) -> SpooledEvent:
    used = event.quantities
    tokens = Tokens(used.input_total, used.output_total)
    return SpooledEvent(event.attempt.model, event.attempt.admitted_at, tokens)


def _name(event: UsageEvent) -> str:
    return f"request {event.attempt.request_id}, event {event.id}"


def _chunks(items: Iterable[T]) -> Iterator[list[T]]:
    source = iter(items)
    while chunk := list(islice(source, CHUNK)):
        yield chunk
