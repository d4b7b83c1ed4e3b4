"""Stores the bytes of files in Postgres: sealed rows of some hundred kilobytes, each written and
read in a transaction of its own, so that a slow client holds neither memory nor a connection.

Beside it `s3_contents`. Knows nothing of a file but its id and whose it is; that it is wholly
there, and in which place, says its row.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import sqlalchemy as sa
from cryptography.exceptions import InvalidTag
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db import tenant
from gateway.files.errors import ContentLost
from gateway.files.sealing import CHUNKS
from gateway.files.tables import file_chunks
from gateway.secret import Cipher
from gateway.tenancy.errors import NotFound

PLACE = "postgres"
CHUNK_BYTES = 512 * 1024
"""One row of `file_chunks` holds this many bytes of a file."""


class Writer(Protocol):
    """One file, from its first byte to its last."""

    async def write(self, data: bytes) -> None: ...

    async def finish(self) -> None:
        """Finish writing: all of it is kept when this returns."""
        ...


class Contents(Protocol):
    @property
    def place(self) -> str:
        """The name of this store in the rows of files."""
        ...

    def writer(self, org_id: str, file_id: str) -> Writer: ...

    def read(self, org_id: str, file_id: str) -> AsyncIterator[bytes]:
        """Yield the content from the first byte to the last. Raises: FilesError, UnknownSecret."""
        ...

    async def delete(self, org_id: str, file_id: str) -> None:
        """Delete whatever is there of it. Idempotent. Raises: FilesError."""
        ...


class PostgresContents:
    """`db`: of a role that acts as the tenant which a transaction names. `cipher`: for the purpose
    of files. Of a file that is not there it reads nothing."""

    place = PLACE

    def __init__(self, db: AsyncEngine, cipher: Cipher, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._db, self._cipher, self._chunk_bytes = db, cipher, chunk_bytes

    def writer(self, org_id: str, file_id: str) -> PostgresWriter:
        return PostgresWriter(self._db, self._cipher, org_id, file_id, self._chunk_bytes)

    async def read(self, org_id: str, file_id: str) -> AsyncIterator[bytes]:
        own, last = file_chunks.c, -1
        following = sa.select(file_chunks).order_by(own.number).limit(1)
        following = following.where(own.org_id == org_id, own.file_id == file_id)
        while True:
            async with tenant(self._db, org_id) as conn:
                row = (await conn.execute(following.where(own.number > last))).one_or_none()
            if row is None:
                return
            last = row.number
            try:
                plain: bytes = CHUNKS.open(self._cipher, dict(row._mapping))["data"]
            except InvalidTag:
                raise ContentLost(file_id, "a part of it was changed") from None
            yield plain

    async def delete(self, org_id: str, file_id: str) -> None:
        own = file_chunks.c
        gone = sa.delete(file_chunks).where(own.org_id == org_id, own.file_id == file_id)
        async with tenant(self._db, org_id) as conn:
            await conn.execute(gone)


class PostgresWriter:
    def __init__(
        self, db: AsyncEngine, cipher: Cipher, org_id: str, file_id: str, chunk_bytes: int
    ) -> None:
        self._db, self._cipher, self._org_id, self._file_id = db, cipher, org_id, file_id
        self._chunk_bytes = chunk_bytes
        self._buffer = bytearray()
        self._number = 0

    async def write(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= self._chunk_bytes:
            await self._flush(bytes(self._buffer[: self._chunk_bytes]))
            del self._buffer[: self._chunk_bytes]

    async def finish(self) -> None:
        if self._buffer:
            await self._flush(bytes(self._buffer))
            self._buffer.clear()

    async def _flush(self, data: bytes) -> None:
        row = {
            "file_id": self._file_id,
            "org_id": self._org_id,
            "number": self._number,
            "data": data,
        }
        row |= CHUNKS.seal(self._cipher, row)
        try:
            async with tenant(self._db, self._org_id) as conn:
                await conn.execute(sa.insert(file_chunks).values(**row))
        except IntegrityError as error:  # its file is gone
            raise NotFound("file", "the upload took too long") from error
        self._number += 1
