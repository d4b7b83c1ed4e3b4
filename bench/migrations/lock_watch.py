"""Watches which locks on tables a Postgres session waits for, and which it keeps others out with.

The server says since when a lock is waited for, so a wait is known to within one look; how long a
lock is held, to within two.
"""

from __future__ import annotations

import asyncio
import time

import asyncpg
import msgspec

LOOK_S = 0.02
KEEPS_OTHERS_OUT = (
    "ShareLock",
    "ShareRowExclusiveLock",
    "ExclusiveLock",
    "AccessExclusiveLock",
)
"""The modes that conflict with reading or writing rows; ACCESS SHARE to SHARE UPDATE EXCLUSIVE do
not."""
LOCKS = """
    SELECT a.application_name, c.relname, l.mode, l.granted, l.pid,
        extract(epoch FROM clock_timestamp() - l.waitstart)::float8 AS waited_s
    FROM pg_locks l
    JOIN pg_stat_activity a ON a.pid = l.pid
    JOIN pg_class c ON c.oid = l.relation
    WHERE l.locktype = 'relation' AND c.relname = ANY($1)
        AND (NOT l.granted OR l.mode = ANY($2))
"""


class LockWatch(msgspec.Struct, kw_only=True):
    """Keeps what was seen of the locks on some tables. Times are in seconds."""

    looks: int = 0
    longest_pause_s: float = 0.0
    """The longest time between two looks: where the machine is busy, more than `LOOK_S`."""
    longest_wait_s: dict[str, float] = msgspec.field(default_factory=dict)
    """By the name of the application that waited."""
    longest_hold_s: dict[str, float] = msgspec.field(default_factory=dict)
    """By the name of the application, the mode and the table."""

    async def run(self, connection: asyncpg.Connection, tables: list[str]) -> None:
        """Look until this is cancelled."""
        held_since: dict[tuple[str, str, str, int], float] = {}
        before = time.monotonic()
        while True:
            rows = await connection.fetch(LOCKS, tables, list(KEEPS_OTHERS_OUT))
            now = time.monotonic()
            self.looks += 1
            self.longest_pause_s = max(self.longest_pause_s, now - before)
            held = set()
            for name, table, mode, granted, pid, waited_s in rows:
                if not granted:
                    waited = max(self.longest_wait_s.get(name, 0.0), waited_s or 0.0)
                    self.longest_wait_s[name] = waited
                elif mode in KEEPS_OTHERS_OUT:
                    held.add(key := (name, table, mode, pid))
                    self._note_hold(key, now - held_since.setdefault(key, before))
            held_since = {key: since for key, since in held_since.items() if key in held}
            before = now
            await asyncio.sleep(LOOK_S)

    def _note_hold(self, key: tuple[str, str, str, int], seconds: float) -> None:
        name, table, mode, _ = key
        words = f"{name}: {mode} on {table}"
        self.longest_hold_s[words] = max(self.longest_hold_s.get(words, 0.0), seconds)
