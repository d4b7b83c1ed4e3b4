"""Follows what is stored, for one `tollgate up`: merges it with the file's settings, asks for a
reload when it changes, and reports what came of that.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.installation.items import read_number, read_stored, report_home
from gateway.installation.merge import Kind, Merger, file_names
from gateway.settings.load import Settings

LOOK_S = 0.5
"""Between two looks at the number: a change is in force at all workers within two seconds."""
REPORT_S = 20.0
"""A home is said to run at least so often (`items.HOME_SEEN`)."""

ReloadAll = Callable[[], Awaitable[str]]
"""Puts what the file and Postgres say in force; returns why not, else an empty text."""


class StoredSettingsFollower:
    """Follows for one home. `clock`: monotonic seconds."""

    def __init__(
        self, db: AsyncEngine, merger: Merger, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._db, self._merger, self._clock = db, merger, clock
        self._tried = 0
        """The number of what was merged last; 0: nothing is stored."""
        self._file_names: dict[Kind, list[str]] = {}
        self._problem = ""
        self._reported: tuple[int, str, dict[Kind, list[str]]] | None = None
        self._reported_at = 0.0

    async def merged_into(self, settings: Settings) -> Settings:
        """Return the settings of the file with those that are stored. Raises: SettingsError,
        OSError, sqlalchemy.exc.SQLAlchemyError."""
        async with self._db.connect() as conn:
            stored = await read_stored(conn)
        self._tried, self._file_names = stored.number, file_names(settings)
        return self._merger.merged(settings, stored.items)

    def note(self, problem: str) -> None:
        """Note what came of the last settings that were to be in force; empty: they are."""
        self._problem = problem

    async def look(self, reload_all: ReloadAll) -> None:
        """Look once. Raises: OSError, sqlalchemy.exc.SQLAlchemyError."""
        async with self._db.connect() as conn:
            number = await read_number(conn)
        if number != self._tried:
            self.note(await reload_all())
            # What could not even be read is not tried again at each look, but at its next change.
            self._tried = max(self._tried, number)
        found = (self._tried, self._problem, self._file_names)
        if found != self._reported or self._clock() - self._reported_at > REPORT_S:
            async with self._db.begin() as conn:
                await report_home(conn, self._merger.home, *found)
            self._reported, self._reported_at = found, self._clock()
