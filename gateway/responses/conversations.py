"""Stores conversations in Postgres: a row of items to which answers are added, kept until they are
deleted. A conversation is a project's. Its metadata and each of its items are sealed and bound to
their place. An item is there once: one that is added again, by its id, changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.db import tenant
from gateway.ids import uuid7_hex
from gateway.request_errors import BadField
from gateway.responses.kept import ResponseOwner, to_json
from gateway.responses.tables import conversation_items as items_table
from gateway.responses.tables import conversations as table
from gateway.responses.tables import owned
from gateway.secret import Cipher
from gateway.tenancy.errors import NotFound
from gateway.tenancy.pages import Order
from gateway.wire.openai_responses.conversations import ConversationObject
from gateway.wire.openai_responses.items import MAX_ITEMS, Item

log = logging.getLogger(__name__)

ID_PREFIX = "conv_"
MAX_CONVERSATION_BYTES = 16 * 1024 * 1024
"""The sealed items of one conversation have at most this size."""
INSERTED_AT_A_TIME = 1000

_item_decoder = msgspec.json.Decoder(Item)
_metadata_decoder = msgspec.json.Decoder(dict[str, str])


class ConversationStore:
    """The conversations of one process. `db` acts as the tenant."""

    def __init__(self, *, db: AsyncEngine, cipher: Cipher) -> None:
        self._db = db
        self._cipher = cipher

    async def create(
        self,
        conn: AsyncConnection,
        owner: ResponseOwner,
        metadata: dict[str, str],
        items: Sequence[Item],
    ) -> ConversationObject:
        """Raises: BadField."""
        conversation_id = ID_PREFIX + uuid7_hex()
        row = {
            "id": conversation_id,
            "org_id": owner.org_id,
            "project_id": owner.project_id,
            **self._seal_metadata(owner, conversation_id, metadata),
        }
        made = await conn.execute(insert(table).values(row).returning(table))
        found = self._to_conversation(owner, made.one())
        await self.append(conn, owner, conversation_id, items)
        return found

    async def find(self, owner: ResponseOwner, conversation_id: str) -> ConversationObject:
        """Raises: NotFound."""
        async with tenant(self._db, owner.org_id) as conn:
            return self._to_conversation(owner, await one(conn, owner, conversation_id))

    async def update(
        self, owner: ResponseOwner, conversation_id: str, metadata: dict[str, str]
    ) -> ConversationObject:
        """Raises: NotFound."""
        sealed = self._seal_metadata(owner, conversation_id, metadata)
        changed = sa.update(table).where(*of_it(owner, conversation_id)).values(**sealed)
        async with tenant(self._db, owner.org_id) as conn:
            row = (await conn.execute(changed.returning(table))).one_or_none()
        if row is None:
            raise missing(conversation_id)
        return self._to_conversation(owner, row)

    async def delete(self, owner: ResponseOwner, conversation_id: str) -> None:
        """Delete a conversation with all its items. Raises: NotFound."""
        async with tenant(self._db, owner.org_id) as conn:
            gone = await conn.execute(sa.delete(table).where(*of_it(owner, conversation_id)))
        if gone.rowcount == 0:
            raise missing(conversation_id)

    async def add_items(
        self, owner: ResponseOwner, conversation_id: str, items: Sequence[Item]
    ) -> None:
        """Raises: NotFound, BadField."""
        async with tenant(self._db, owner.org_id) as conn:
            await self.append(conn, owner, conversation_id, items)

    async def items(self, owner: ResponseOwner, conversation_id: str) -> tuple[Item, ...]:
        """Return all items from the first. Raises: NotFound."""
        listed = sa.select(items_table).where(*in_it(owner, conversation_id))
        async with tenant(self._db, owner.org_id) as conn:
            await one(conn, owner, conversation_id)
            rows = (await conn.execute(listed.order_by(items_table.c.position))).all()
        return tuple(self._to_item(owner, row) for row in rows)

    async def page(
        self,
        owner: ResponseOwner,
        conversation_id: str,
        *,
        after: str | None,
        limit: int,
        order: Order,
    ) -> tuple[list[Item], bool]:
        """Return a page of items, and whether there are more. Raises: NotFound."""
        position = items_table.c.position
        listed = sa.select(items_table).where(*in_it(owner, conversation_id))
        async with tenant(self._db, owner.org_id) as conn:
            await one(conn, owner, conversation_id)
            if after is not None:
                at = (await self._row(conn, owner, conversation_id, after)).position
                listed = listed.where(position > at if order == "asc" else position < at)
            listed = listed.order_by(position.asc() if order == "asc" else position.desc())
            rows = (await conn.execute(listed.limit(limit + 1))).all()
        return [self._to_item(owner, row) for row in rows[:limit]], len(rows) > limit

    async def item(self, owner: ResponseOwner, conversation_id: str, item_id: str) -> Item:
        """Raises: NotFound."""
        async with tenant(self._db, owner.org_id) as conn:
            return self._to_item(owner, await self._row(conn, owner, conversation_id, item_id))

    async def delete_item(
        self, owner: ResponseOwner, conversation_id: str, item_id: str
    ) -> ConversationObject:
        """Raises: NotFound."""
        async with tenant(self._db, owner.org_id) as conn:
            row = await one(conn, owner, conversation_id, lock=True)
            gone = sa.delete(items_table).where(*in_it(owner, conversation_id))
            gone = gone.where(items_table.c.id == item_id)
            size_bytes = await conn.scalar(gone.returning(size_of_content()))
            if size_bytes is None:
                raise NotFound("item_id", f"no item {item_id!r} in {conversation_id!r}")
            smaller = sa.update(table).where(*of_it(owner, conversation_id))
            await conn.execute(smaller.values(size_bytes=table.c.size_bytes - size_bytes))
        return self._to_conversation(owner, row)

    async def append(
        self,
        conn: AsyncConnection,
        owner: ResponseOwner,
        conversation_id: str,
        items: Sequence[Item],
    ) -> None:
        """Append items in the transaction of whoever has them. Raises: NotFound, BadField."""
        row = await one(conn, owner, conversation_id, lock=True)
        if not items:
            return
        rows = [
            self._to_row(owner, conversation_id, item, row.next_position + index)
            for index, item in enumerate(items)
        ]
        size_bytes = row.size_bytes
        for at in range(0, len(rows), INSERTED_AT_A_TIME):
            some = rows[at : at + INSERTED_AT_A_TIME]
            added = insert(items_table).values(some).on_conflict_do_nothing()
            sizes = await conn.execute(added.returning(size_of_content()))
            size_bytes += sum(sizes.scalars())
        check_room(row.next_position + len(items), size_bytes)
        grown = {"next_position": row.next_position + len(items), "size_bytes": size_bytes}
        await conn.execute(sa.update(table).where(*of_it(owner, conversation_id)).values(**grown))

    async def append_if_there(
        self,
        conn: AsyncConnection,
        owner: ResponseOwner,
        conversation_id: str,
        items: Sequence[Item],
    ) -> None:
        """Append items; a conversation that is gone or full by now keeps no answer from being
        kept."""
        try:
            async with conn.begin_nested():
                await self.append(conn, owner, conversation_id, items)
        except (NotFound, BadField) as error:
            log.warning("not added to %s: %s", conversation_id, type(error).__name__)

    async def _row(
        self, conn: AsyncConnection, owner: ResponseOwner, conversation_id: str, item_id: str
    ) -> sa.Row[Any]:
        found = sa.select(items_table).where(*in_it(owner, conversation_id))
        row = (await conn.execute(found.where(items_table.c.id == item_id))).one_or_none()
        if row is None:
            raise NotFound("item_id", f"no item {item_id!r} in {conversation_id!r}")
        return row

    def _seal_metadata(
        self, owner: ResponseOwner, conversation_id: str, metadata: dict[str, str]
    ) -> dict[str, Any]:
        sealed = self._cipher.seal(to_json(metadata), owner.context(conversation_id))
        return {"metadata": sealed.data, "secret_id": sealed.secret_id}

    def _to_conversation(self, owner: ResponseOwner, row: sa.Row[Any]) -> ConversationObject:
        plain = self._cipher.open(row.metadata, owner.context(row.id), row.secret_id)
        return ConversationObject(
            id=row.id,
            created_at=int(row.created_at.timestamp()),
            metadata=_metadata_decoder.decode(plain),
        )

    def _to_row(
        self, owner: ResponseOwner, conversation_id: str, item: Item, position: int
    ) -> dict[str, Any]:
        context = owner.context(conversation_id, item.id)
        sealed = self._cipher.seal(to_json(item), context)
        return {
            "conversation_id": conversation_id,
            "id": item.id,
            "org_id": owner.org_id,
            "project_id": owner.project_id,
            "position": position,
            "content": sealed.data,
            "secret_id": sealed.secret_id,
        }

    def _to_item(self, owner: ResponseOwner, row: sa.Row[Any]) -> Item:
        context = owner.context(row.conversation_id, row.id)
        plain = self._cipher.open(row.content, context, row.secret_id)
        found: Item = _item_decoder.decode(plain)
        return found


async def one(
    conn: AsyncConnection, owner: ResponseOwner, conversation_id: str, *, lock: bool = False
) -> sa.Row[Any]:
    """Raises: NotFound."""
    found = sa.select(table).where(*of_it(owner, conversation_id))
    if lock:
        found = found.with_for_update()
    row = (await conn.execute(found)).one_or_none()
    if row is None:
        raise missing(conversation_id)
    return row


def of_it(owner: ResponseOwner, conversation_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    return (*owned(table, owner), table.c.id == conversation_id)


def in_it(owner: ResponseOwner, conversation_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    return (*owned(items_table, owner), items_table.c.conversation_id == conversation_id)


def size_of_content() -> sa.ColumnElement[int]:
    return sa.func.octet_length(items_table.c.content)


def check_room(num_items: int, size_bytes: int) -> None:
    """Raises: BadField."""
    if num_items > MAX_ITEMS:
        raise BadField(f"A conversation has at most {MAX_ITEMS} items.", param="conversation")
    if size_bytes > MAX_CONVERSATION_BYTES:
        message = f"A conversation has at most {MAX_CONVERSATION_BYTES} bytes."
        raise BadField(message, param="conversation")


def missing(conversation_id: str) -> NotFound:
    return NotFound("conversation_id", f"conversation with id {conversation_id!r} not found")
