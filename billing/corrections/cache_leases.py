"""Leases on cached prefixes: a tenant's cache writes buy them, and the price of a lease that the
engine did not keep for its time is refunded.

    granted, then   kept           the engine kept it for its time
                    evicted        the engine needed the room, and reported it
                    engine_lost    its engine ended before, or was silent for LOST_AFTER
                    recomputed     the same prefix was written again during the lease
                    unrecorded     it was billed, but its gateway died before it recorded the lease

All but `kept` are refunded: their event is rated anew (`event_ratings`), with the tokens of the
lease at the price of uncached input instead of that of writing. So a refund is in the ledger, the
rollups, the credits and the invoice as any correction, and later ratings keep it. The outcome is in
the lease's row before the engine gets an acknowledgement; a sweep posts the refund once, as the
event may be booked after its lease has ended.

Knows no engine, only its address and the id of its process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple
from uuid import NAMESPACE_OID, uuid5

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.cache_contracts import TTL_S, WRITES, Ttl
from billing.corrections.event_ratings import (
    UNKEPT,
    WAITS,
    Announce,
    RatedEvent,
    Rating,
    announce_to_nobody,
    hold_corrections,
    post_ratings,
    rate_event,
    select_rated_events,
    to_rated_event,
    to_rating,
)
from billing.events import UsageEvent
from billing.money import Pico
from billing.pricing.rating import premium
from billing.tables import cache_leases, cache_writes, to_moment

Outcome = Literal["kept", "evicted", "engine_lost", "recomputed", "unrecorded"]
HEARD_WITHIN = "15 seconds"
"""A lease was kept if its engine has not reported an eviction so long after its end."""
RECORDED_WITHIN = "30 seconds"
"""A lease may be recorded until so long after its event was booked."""
LOST_AFTER = "1 hour"
"""An engine is lost if it is silent for so long after the end of a lease."""
SKEW = "1 second"
"""The largest difference between the clocks of two gateways."""
BATCH = 500
_SWEEPING = 0x6C65617365730001


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    org_id: str
    event_id: str
    model: str
    engine: str
    engine_id: str
    ttl: Ttl
    num_tokens: int
    """The tokens that were written for it."""
    end_tokens: int
    """The length of the prefix in tokens."""
    prefix: bytes
    """A digest of the prefix."""
    granted_at: float
    asked_at: float
    """The Unix seconds of the request."""


class LiveEngine(NamedTuple):
    """An engine that answers now."""

    engine: str
    engine_id: str
    since: float
    """The Unix seconds at which the caller first saw this process."""


class LeaseChange(NamedTuple):
    """The model and the new outcome of a lease."""

    model: str
    outcome: Outcome


_TYPES = {
    **dict.fromkeys(("id", "org_id", "event_id", "model", "engine", "engine_id", "ttl"), "text"),
    **dict.fromkeys(("num_tokens", "end_tokens"), "bigint"),
    "prefix": "bytea",
    **dict.fromkeys(("granted_at", "kept_until"), "timestamptz"),
}
_COLUMNS = ", ".join(_TYPES)
_GRANT = sa.text(f"""
    WITH asked AS (
        SELECT {", ".join(f"CAST(:{name} AS {kind}) AS {name}" for name, kind in _TYPES.items())}
    ),
    granted AS (
        INSERT INTO cache_leases ({_COLUMNS})
        SELECT {_COLUMNS} FROM asked a
        WHERE NOT EXISTS (SELECT FROM cache_leases l
            WHERE l.event_id = a.event_id AND l.outcome = 'unrecorded')
        ON CONFLICT (id) DO NOTHING
    )
    UPDATE cache_leases l SET ended_at = a.granted_at, outcome = 'recomputed' FROM asked a
    WHERE l.id <> a.id AND ended_at IS NULL AND l.kept_until > a.granted_at
        AND (l.org_id, l.model, l.engine, l.engine_id, l.end_tokens, l.prefix)
            = (a.org_id, a.model, a.engine, a.engine_id, a.end_tokens, a.prefix)
        AND l.granted_at < CAST(:asked_at AS timestamptz) - interval '{SKEW}'
    RETURNING l.model, outcome
""")


async def grant(db: AsyncEngine, lease: Lease) -> list[LeaseChange]:
    """Record a lease; idempotent. Earlier leases on the same prefix end as `recomputed`, since it
    need not have been written again; they are returned."""
    row: dict[str, Any] = msgspec.structs.asdict(lease)
    row["granted_at"] = to_moment(lease.granted_at)
    row["asked_at"] = to_moment(lease.asked_at)
    row["kept_until"] = to_moment(lease.granted_at + TTL_S[lease.ttl])
    async with db.begin() as conn:
        return [LeaseChange(*each) for each in await conn.execute(_GRANT, row)]


_END = sa.text("""
    UPDATE cache_leases SET outcome = :outcome, ended_at = now()
    WHERE id = :id AND (ended_at IS NULL OR outcome = 'kept')
        AND outcome IS DISTINCT FROM :outcome
    RETURNING model, outcome
""")
_STANDS = sa.text("""
    SELECT EXISTS (SELECT FROM cache_leases
        WHERE id = :id OR (event_id = :event_id AND outcome = 'unrecorded'))
""")


async def end(
    db: AsyncEngine, lease_id: str, event_id: str, *, is_broken: bool
) -> list[LeaseChange] | None:
    """End a lease as its engine reports. None: neither it nor its event's leases are recorded."""
    named = {"id": lease_id, "outcome": "evicted" if is_broken else "kept"}
    async with db.begin() as conn:
        changed = [LeaseChange(*each) for each in await conn.execute(_END, named)]
        stands = await conn.scalar(_STANDS, {"id": lease_id, "event_id": event_id})
    return changed if stands else None


async def note_writes(db: AsyncEngine, events: Sequence[UsageEvent]) -> None:
    """Record the events with cache writes, for which leases should be recorded; idempotent."""
    rows = [
        {"event_id": event.id, "org_id": event.attempt.org}
        for event in events
        if event.kind == "usage" and any(getattr(event.quantities, it) for it in WRITES.values())
    ]
    if rows:
        async with db.begin() as conn:
            await conn.execute(insert(cache_writes).on_conflict_do_nothing(), rows)


_UNRECORDED = sa.text(f"""
    WITH due AS (
        DELETE FROM cache_writes WHERE event_id IN (
            SELECT event_id FROM cache_writes
            WHERE booked_at < now() - interval '{RECORDED_WITHIN}'
            ORDER BY booked_at LIMIT {BATCH})
        RETURNING event_id
    ),
    missing AS (
        SELECT u.id, u.org, u.model, u.admitted_at, w.ttl,
            w.written - coalesce((SELECT sum(l.num_tokens) FROM cache_leases l
                WHERE l.event_id = u.id AND l.ttl = w.ttl), 0) AS num_tokens
        FROM due JOIN usage_events u ON u.id = due.event_id
            CROSS JOIN LATERAL (VALUES ('5m', cache_write_5m), ('1h', cache_write_1h))
                AS w(ttl, written)
    )
    INSERT INTO cache_leases ({_COLUMNS}, ended_at, outcome)
    SELECT id || ':' || ttl, org, id, model, '', '', ttl, num_tokens, 0, '', admitted_at,
        admitted_at, now(), 'unrecorded'
    FROM missing WHERE num_tokens > 0
    ON CONFLICT (id) DO NOTHING
    RETURNING model, outcome
""")
_ALIVE = """
    unnest(CAST(:engines AS text[]), CAST(:engine_ids AS text[]), CAST(:sinces AS timestamptz[]))
        AS a(engine, engine_id, since)
"""
_KEPT = sa.text(f"""
    UPDATE cache_leases l SET ended_at = kept_until, outcome = 'kept' FROM {_ALIVE}
    WHERE ended_at IS NULL AND l.engine = a.engine AND l.engine_id = a.engine_id
        AND greatest(kept_until, since) < now() - interval '{HEARD_WITHIN}'
    RETURNING model, outcome
""")
_ENGINE_LOST = sa.text(f"""
    UPDATE cache_leases l SET ended_at = now(), outcome = 'engine_lost'
    WHERE ended_at IS NULL AND (kept_until < now() - interval '{LOST_AFTER}' OR EXISTS (
        SELECT FROM {_ALIVE} WHERE l.engine = a.engine AND l.engine_id <> a.engine_id
            AND l.granted_at < since))
    RETURNING model, outcome
""")


async def sweep(
    db: AsyncEngine, alive: Sequence[LiveEngine], announce: Announce = announce_to_nobody
) -> Counter[LeaseChange]:
    """End leases whose time is over, and post refunds. Leases are ended by one gateway at a
    time."""
    engines = {
        "engines": [each.engine for each in alive],
        "engine_ids": [each.engine_id for each in alive],
        "sinces": [to_moment(each.since) for each in alive],
    }
    changed: Counter[LeaseChange] = Counter()
    async with db.begin() as conn:
        if await conn.scalar(sa.select(sa.func.pg_try_advisory_xact_lock(_SWEEPING))):
            for query, named in ((_KEPT, engines), (_ENGINE_LOST, engines), (_UNRECORDED, {})):
                changed.update(LeaseChange(*each) for each in await conn.execute(query, named))
    await refund(db, announce)
    return changed


def select_leases(org_id: str, is_open: bool | None = None) -> sa.Select[Any]:
    """Select an org's leases. `is_open`: only those that have not ended, or only the others."""
    found = sa.select(cache_leases).where(cache_leases.c.org_id == org_id)
    if is_open is None:
        return found
    ended_at = cache_leases.c.ended_at
    return found.where(ended_at.is_(None) if is_open else ended_at.is_not(None))


# ---- refunds

_OWED = sa.text(f"""
    SELECT l.id, l.event_id, l.ttl, l.num_tokens
    FROM cache_leases l JOIN usage_events u ON u.id = l.event_id
    WHERE l.refunded_pico IS NULL AND l.outcome <> 'kept' AND NOT ({WAITS})
    ORDER BY l.id LIMIT {BATCH} FOR UPDATE OF l
""")
_STANDING = sa.text(f"{select_rated_events(UNKEPT)} WHERE u.id = ANY(CAST(:ids AS text[]))")
_REFUNDED = sa.text("""
    UPDATE cache_leases l SET refunded_pico = r.refunded_pico, refund_id = r.refund_id,
        refund_seq = (SELECT nextval('posting_seq'))
    FROM unnest(CAST(:ids AS text[]), CAST(:refund_ids AS text[]), CAST(:amounts AS numeric[]))
        AS r(id, refund_id, refunded_pico)
    WHERE l.id = r.id
""")
_ARE_OWED = f"""
    EXISTS (SELECT FROM cache_leases l JOIN usage_events u ON u.id = l.event_id
        WHERE l.refunded_pico IS NULL AND l.outcome <> 'kept' AND NOT ({WAITS}))
"""
_ANY_OWED = sa.text(f"SELECT {_ARE_OWED}")
NEXT_DUE = f"""
    SELECT least((SELECT now() FROM cache_leases WHERE ended_at IS NULL LIMIT 1),
        (SELECT min(booked_at) + interval '{RECORDED_WITHIN}' FROM cache_writes),
        (SELECT now() WHERE {_ARE_OWED}))
"""
"""SQL: the moment at which there is something to sweep, or NULL. While a lease is open that is now:
only who sees the engines knows which are gone."""


async def refund(db: AsyncEngine, announce: Announce = announce_to_nobody) -> int:
    """Rate the events of broken leases anew. Returns how many leases that was for."""
    async with db.connect() as conn:
        if not await conn.scalar(_ANY_OWED):
            return 0
    async with db.begin() as conn:
        await hold_corrections(conn)
        leases = (await conn.execute(_OWED)).all()
        # Events are read after the leases, so that their unkept tokens include all of these.
        rows = await conn.execute(_STANDING, {"ids": sorted({it.event_id for it in leases})})
        events = {row.id: to_rated_event(row) for row in rows}
        # Waste is paid by the house and not refunded.
        ratings = [without_premium(each) for each in events.values() if each.kind == "usage"]
        changing = [each for each in ratings if not each.changes_nothing]
        await post_ratings(conn, changing, reverses=True, announce=announce)
        refunded = {
            "ids": [it.id for it in leases],
            "refund_ids": [refund_id(it.id) for it in leases],
            "amounts": [_premium(it, events[it.event_id]) for it in leases],
        }
        await conn.execute(_REFUNDED, refunded)
    return len(leases)


def without_premium(event: RatedEvent) -> Rating:
    """Rate unkept tokens at the uncached price. If all tokens of a component were not kept, the
    rating has the uncached price for it."""
    prices, uncached = dict(event.prices), event.prices.get("uncached_input")
    for component, num_tokens in event.unkept.items():
        if num_tokens and uncached and num_tokens == getattr(event.quantities, component):
            prices[component] = uncached
    rated = rate_event(event, event.prices)
    return to_rating(event, rated, prices)


def refund_id(lease_id: str) -> str:
    return str(uuid5(NAMESPACE_OID, f"{lease_id}:refund"))


def _premium(lease: sa.Row[Any], event: RatedEvent) -> Pico:
    if event.kind != "usage":
        return 0
    size = event.quantities.input_total
    return premium(WRITES[lease.ttl], lease.num_tokens, event.prices, size)
