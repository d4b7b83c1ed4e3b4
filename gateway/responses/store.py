"""Stores responses in Postgres: kept when they end, found by their id, continued, and forgotten in
time. A row is a project's: another's id is as good as none. What it holds is sealed under a key
derived from the installation's secret, and bound to its place. A response names the one that it
continues, so that a conversation is kept once, however long it gets. One whose time is over is
found no more; it stays for those that continue it, and the sweep takes it with the last of them.
One that was deleted takes what it held with it: then those cannot be continued either."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from foundation.periodic import Periodic
from gateway.db import DATABASE_ERRORS, tenant
from gateway.request_errors import BadField
from gateway.responses.conversations import ConversationStore
from gateway.responses.kept import ResponseOwner, StoredResponse, decode, encode
from gateway.responses.tables import conversations, owned
from gateway.responses.tables import response_events as events
from gateway.responses.tables import responses as table
from gateway.secret import Cipher
from gateway.tenancy.errors import NotFound
from gateway.tenancy.projects import keeps_nothing
from gateway.wire.openai_responses.items import Item

log = logging.getLogger(__name__)

MAX_CONTINUED = 1000
"""Responses, one behind the other."""
MAX_CONTINUED_BYTES = 16 * 1024 * 1024
CAN_BE_CONTINUED = ("completed", "incomplete")
EVENTS_LIFETIME_S = 24 * 3600
"""Events of a background response are deleted after this time; the response itself stays."""
SWEEP_INTERVAL_S = 600.0
SWEEP_BATCH = 500


class KeptRows:
    """The rows of one process. `db` acts as the tenant, `system_db` as the system."""

    def __init__(
        self,
        *,
        db: AsyncEngine,
        system_db: AsyncEngine,
        conversations: ConversationStore,
        cipher: Cipher,
        lifetime_s: float,
    ) -> None:
        self._db = db
        self._conversations = conversations
        self._system_db = system_db
        self._cipher = cipher
        self._lifetime = timedelta(seconds=lifetime_s)


class ResponseStore(KeptRows):
    """The stored responses of one process."""

    async def keep(
        self,
        owner: ResponseOwner,
        response_id: str,
        kept: StoredResponse,
        *,
        status: str,
        previous_id: str | None,
        added_to: str | None = None,
    ) -> None:
        """Keep a response. `added_to`: a conversation, which gets it in the same transaction."""
        row = {
            "id": response_id,
            "org_id": owner.org_id,
            "project_id": owner.project_id,
            "previous_id": previous_id,
            "status": status,
            "expires_at": sa.func.now() + self._lifetime,
            **sealed(self._cipher, owner, response_id, kept),
        }
        async with tenant(self._db, owner.org_id) as conn:
            await conn.execute(insert(table).values(**row))
            if added_to is not None:
                await self._conversations.append_if_there(conn, owner, added_to, kept.items)

    async def find(self, owner: ResponseOwner, response_id: str) -> StoredResponse:
        """Raises: NotFound."""
        async with tenant(self._db, owner.org_id) as conn:
            row = (await conn.execute(sa.select(table).where(*alive(owner, response_id)))).first()
        if row is None:
            raise missing(response_id)
        return opened(self._cipher, row)

    async def delete(self, owner: ResponseOwner, response_id: str) -> None:
        """Raises: NotFound."""
        async with tenant(self._db, owner.org_id) as conn:
            gone = await conn.execute(sa.delete(table).where(*alive(owner, response_id)))
        if gone.rowcount == 0:
            raise missing(response_id)

    async def context(self, owner: ResponseOwner, response_id: str) -> tuple[Item, ...]:
        """Return what came before whoever continues a response, from the first. Raises:
        BadField."""
        async with tenant(self._db, owner.org_id) as conn:
            ids = await self._continued(conn, owner, response_id)
            found = sa.select(table).where(*owned(table, owner), table.c.id.in_(ids))
            rows = {row.id: row for row in await conn.execute(found)}
        for each in ids:
            if each not in rows:  # deleted between two looks
                raise lost(each, response_id)
        return tuple(item for each in ids for item in opened(self._cipher, rows[each]).items)

    async def _continued(
        self, conn: AsyncConnection, owner: ResponseOwner, response_id: str
    ) -> Sequence[str]:
        """Return the ids of what it continues, from the first, and its own."""
        shown = (table.c.id, table.c.previous_id, table.c.status)
        size = sa.func.octet_length(table.c.content).label("size_bytes")
        first = sa.select(*shown, size, sa.literal(1).label("depth"))
        chain = first.where(*alive(owner, response_id)).cte("chain", recursive=True)
        before = sa.select(*shown, size, chain.c.depth + 1)
        before = before.join(chain, table.c.id == chain.c.previous_id)
        before = before.where(*owned(table, owner), chain.c.depth <= MAX_CONTINUED)
        chain = chain.union_all(before)
        rows = (await conn.execute(sa.select(chain).order_by(chain.c.depth.desc()))).all()
        check_continued(rows, response_id)
        return [row.id for row in rows]

    async def sweep(self) -> int:
        """Delete what has expired and nobody continues, and what stood in a project before it was
        archived or was to keep nothing; return how many responses."""
        await self._sweep_events()
        await self._sweep_conversations()
        swept = 0
        later = table.alias("later")
        is_continued = sa.exists().where(
            later.c.org_id == table.c.org_id, later.c.previous_id == table.c.id
        )
        is_over = sa.and_(table.c.expires_at < sa.func.now(), ~is_continued)
        is_erased = keeps_nothing(table.c.org_id, table.c.project_id)
        old = sa.select(table.c.id).where(sa.or_(is_over, is_erased))
        old = old.limit(SWEEP_BATCH).with_for_update(skip_locked=True, of=table)
        while True:
            async with self._system_db.begin() as conn:
                done = (await conn.execute(sa.delete(table).where(table.c.id.in_(old)))).rowcount
            swept += done
            if done == 0:  # fewer than a batch may have let others go
                return swept

    async def _sweep_events(self) -> None:
        age = sa.func.now() - timedelta(seconds=EVENTS_LIFETIME_S)
        place = sa.tuple_(events.c.response_id, events.c.first_number)
        old = sa.select(events.c.response_id, events.c.first_number)
        old = old.where(events.c.created_at < age).limit(SWEEP_BATCH)
        gone = sa.delete(events).where(place.in_(old.with_for_update(skip_locked=True)))
        while True:
            async with self._system_db.begin() as conn:
                if (await conn.execute(gone)).rowcount < SWEEP_BATCH:
                    return

    async def _sweep_conversations(self) -> None:
        old = sa.select(conversations.c.id).where(
            keeps_nothing(conversations.c.org_id, conversations.c.project_id)
        )
        old = old.limit(SWEEP_BATCH).with_for_update(skip_locked=True, of=conversations)
        gone = sa.delete(conversations).where(conversations.c.id.in_(old))
        while True:
            async with self._system_db.begin() as conn:
                if (await conn.execute(gone)).rowcount < SWEEP_BATCH:
                    return

    def periodic_sweep(self) -> Periodic:
        """Return the sweep that each worker repeats while it runs."""
        return Periodic(
            "sweep responses",
            SWEEP_INTERVAL_S,
            self.sweep,
            log=log,
            failure="responses were not swept",
            expected=DATABASE_ERRORS,
            at_once=False,
        )


def sealed(
    cipher: Cipher, owner: ResponseOwner, response_id: str, kept: StoredResponse
) -> dict[str, str | bytes]:
    found = cipher.seal(encode(kept), owner.context(response_id))
    return {"content": found.data, "secret_id": found.secret_id}


def opened(cipher: Cipher, row: sa.Row[Any]) -> StoredResponse:
    context = ResponseOwner(row.org_id, row.project_id).context(row.id)
    return decode(cipher.open(row.content, context, row.secret_id))


def alive(owner: ResponseOwner, response_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    return (*owned(table, owner), table.c.id == response_id, table.c.expires_at > sa.func.now())


def check_continued(rows: Sequence[sa.Row[Any]], response_id: str) -> None:
    """Check rows from the first to `response_id`. Raises: BadField."""
    if not rows:
        raise lost(response_id, response_id)
    if rows[0].previous_id is not None and len(rows) <= MAX_CONTINUED:
        raise lost(rows[0].previous_id, response_id)
    if rows[-1].status not in CAN_BE_CONTINUED:
        raise bad_previous(
            f"Response '{response_id}' is {rows[-1].status}: only one that was answered can be"
            " continued."
        )
    if len(rows) > MAX_CONTINUED:
        raise bad_previous(f"More than {MAX_CONTINUED} responses are continued, one by the other.")
    if sum(row.size_bytes for row in rows) > MAX_CONTINUED_BYTES:
        raise bad_previous(f"More than {MAX_CONTINUED_BYTES} bytes are continued.")


def missing(response_id: str) -> NotFound:
    return NotFound("response_id", f"response with id {response_id!r} not found")


def lost(response_id: str, last_id: str) -> BadField:
    """Return the refusal. last_id: which continues it, if it is another."""
    said = f"Previous response with id '{response_id}' not found"
    if response_id == last_id:
        return bad_previous(f"{said}.")
    return bad_previous(f"{said}, which '{last_id}' continues: it was deleted.")


def bad_previous(message: str) -> BadField:
    return BadField(message, param="previous_response_id")
