"""Is the log what was recorded? Every hash is computed again, from the first entry to the head.

Reads one snapshot, so that the log may grow meanwhile.

What the chain shows by itself: an entry that was edited, taken out, put in or moved. A tail that
was cut off is missed by the head. Who may write to Postgres as he likes could cut the head too, or
write a whole chain anew; therefore a *witness* outside of it keeps where each chain stood when it
was last found whole, and the next verification must come by there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.audit.chain import GENESIS, AuditEntry, digest
from gateway.audit.tables import entries, heads

BATCH = 1000


class ChainPosition(msgspec.Struct, frozen=True):
    """A place in a chain."""

    sequence: int
    hash: str
    """Hex."""


NOWHERE = ChainPosition(0, GENESIS.hex())


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A fault in an org's log, at the first entry that is not as it was recorded."""

    sequence: int
    id: str | None
    """None where the entry is not there."""
    problem: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    org_id: str
    standing: ChainPosition
    """The last entry that is good."""
    finding: Finding | None = None


async def verify(
    db: AsyncEngine, witness: Mapping[str, ChainPosition], *, org_ids: Sequence[str] | None = None
) -> AsyncIterator[Verdict]:
    """A verdict for each of `org_ids`; without them for all that the database or the witness
    knows."""
    async with db.connect() as conn:
        await conn.execution_options(isolation_level="REPEATABLE READ")
        for org_id in await _known(conn, witness) if org_ids is None else org_ids:
            yield await verify_org(conn, org_id, witness.get(org_id, NOWHERE))


async def _known(conn: AsyncConnection, witness: Mapping[str, ChainPosition]) -> list[str]:
    """An org whose head is gone may have entries, and one whose entries are gone a head."""
    named = sa.union(sa.select(heads.c.org_id), sa.select(entries.c.org_id))
    return sorted({*await conn.scalars(named), *witness})


async def verify_org(conn: AsyncConnection, org_id: str, witness: ChainPosition) -> Verdict:
    wanted = sa.select(heads.c.sequence, heads.c.hash).where(heads.c.org_id == org_id)
    found = (await conn.execute(wanted)).one_or_none()
    head = None if found is None else ChainPosition(found.sequence, found.hash.hex())
    last = NOWHERE
    async for row in _entries(conn, org_id):
        problem = _judge(row, last, head, witness)
        if problem is not None:
            missing = row.sequence > last.sequence + 1
            finding = Finding(
                sequence=last.sequence + 1 if missing else row.sequence,
                id=None if missing else row.id,
                problem=problem,
            )
            return Verdict(org_id=org_id, standing=last, finding=finding)
        last = ChainPosition(row.sequence, row.hash.hex())
    return Verdict(org_id=org_id, standing=last, finding=_judge_end(last, head, witness))


def _judge(
    row: Any, last: ChainPosition, head: ChainPosition | None, witness: ChainPosition
) -> str | None:
    """Return what is wrong with an entry that comes after `last`; None: nothing."""
    if row.sequence > last.sequence + 1:
        return "it is missing"
    if row.sequence <= last.sequence:
        return "it was put in: no chain has this number"
    if row.previous.hex() != last.hash:
        return "it does not follow the entry before it"
    if not _is_as_recorded(row):
        return "it is not what was recorded"
    if row.sequence == witness.sequence and row.hash.hex() != witness.hash:
        return "it is not the one that was here at the last verification"
    if head is not None and row.sequence > head.sequence:
        return f"it was put in: the head is at {head.sequence}"
    return None


def _is_as_recorded(row: Any) -> bool:
    fields = dict(row._mapping)
    try:
        computed = digest(
            AuditEntry(**{name: fields[name] for name in AuditEntry.__struct_fields__})
        )
    except (ValueError, OverflowError):  # a moment that no calendar here has
        return False
    return bool(computed == fields["hash"])


def _judge_end(
    last: ChainPosition, head: ChainPosition | None, witness: ChainPosition
) -> Finding | None:
    following = last.sequence + 1
    if head is None:
        return Finding(sequence=following, id=None, problem="the log has no head any more")
    if head.sequence > last.sequence:
        problem = f"it is missing: the head is at {head.sequence}"
        return Finding(sequence=following, id=None, problem=problem)
    if head.hash != last.hash:
        return Finding(sequence=last.sequence, id=None, problem="the head knows another one")
    if witness.sequence > last.sequence:
        problem = f"it is missing: {witness.sequence} were here at the last verification"
        return Finding(sequence=following, id=None, problem=problem)
    return None


async def _entries(conn: AsyncConnection, org_id: str) -> AsyncIterator[Any]:
    """Yield the entries in order, a batch at a time."""
    after: int | None = None
    while True:
        batch = sa.select(entries).where(entries.c.org_id == org_id)
        if after is not None:
            batch = batch.where(entries.c.sequence > after)
        rows = list(await conn.execute(batch.order_by(entries.c.sequence).limit(BATCH)))
        for row in rows:
            yield row
        if len(rows) < BATCH:
            return
        after = rows[-1].sequence
