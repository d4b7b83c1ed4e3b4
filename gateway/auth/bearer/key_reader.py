"""Reads API keys from Postgres: those that are asked for while others are being read share a query.

So a process that knows no key yet, or none any more, asks for thousands of them at the price of
some hundred queries.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from foundation.tasks import TaskSet
from gateway.tenancy.keys.records import HashedKey, KeyRecord, find_keys, to_record

MAX_CONCURRENT_READS = 4
MAX_KEYS_AT_ONCE = 128
READ_TIMEOUT_S = 5.0
"""A query may take so long, and a key waits no longer for its answer."""

Hashes = tuple[HashedKey, ...]
"""The hashes of one key under each pepper, the current one first."""
Rows = dict[HashedKey, sa.RowMapping]


class _WaitingKey(NamedTuple):
    hashes: Hashes
    answer: asyncio.Future[Rows]


class KeyReader:
    """One per process. `db`: of a role that sees every org's rows."""

    def __init__(self, db: AsyncEngine) -> None:
        self._db = db
        self._waiting: deque[_WaitingKey] = deque()
        self._num_reading = 0
        self._is_started = False
        """A task was started, and has not looked yet who waits."""
        self._tasks = TaskSet()

    async def close(self) -> None:
        await self._tasks.close()

    async def find(self, hashes: Hashes) -> KeyRecord | None:
        """Return the record of a key, revoked or not; None where nobody has it. Raises:
        gateway.db.DATABASE_ERRORS, of them TimeoutError."""
        answer: asyncio.Future[Rows] = asyncio.get_running_loop().create_future()
        self._waiting.append(_WaitingKey(hashes, answer))
        if self._num_reading < MAX_CONCURRENT_READS and not self._is_started:
            self._num_reading += 1
            self._is_started = True
            self._tasks.spawn(self._read_waiting(), name="read api keys")
        rows = await answer
        for hashed in hashes:
            if (row := rows.get(hashed)) is not None:
                return to_record(row, hashed)
        return None

    async def _read_waiting(self) -> None:
        self._is_started = False
        try:
            while self._waiting:
                num = min(len(self._waiting), MAX_KEYS_AT_ONCE)
                await self._read([self._waiting.popleft() for _ in range(num)])
        finally:
            self._num_reading -= 1

    async def _read(self, keys: list[_WaitingKey]) -> None:
        """Answer all of `keys`, also by what is raised."""
        hashes = {hashed for each in keys if not each.answer.done() for hashed in each.hashes}
        if not hashes:
            return  # nobody waits any more
        try:
            async with asyncio.timeout(READ_TIMEOUT_S), self._db.connect() as conn:
                rows = await find_keys(conn, hashes)
        except Exception as error:  # whatever it is, it is for those who wait
            for each in keys:
                if not each.answer.done():
                    each.answer.set_exception(error)
            return
        finally:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                for each in keys:
                    each.answer.cancel()
        for each in keys:
            if not each.answer.done():
                each.answer.set_result(rows)
