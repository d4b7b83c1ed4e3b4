"""Finds the record of one key by its hash, as authentication finds many."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.tenancy.keys.records import KeyRecord, find_keys, to_record


async def find_key(conn: AsyncConnection, *, key_hash: str, pepper_id: str) -> KeyRecord | None:
    hashed = (pepper_id, key_hash)
    row = (await find_keys(conn, [hashed])).get(hashed)
    return None if row is None else to_record(row, hashed)
