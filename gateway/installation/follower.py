"""Follows what is stored, for one `tollgate up` or gateway that runs alone: merges it with the
settings of the file, asks for a reload when it changes, and reports what came of that and which
versions of the models run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from foundation.periodic import BEAT_S, Periodic
from gateway.db import ROLE_SYSTEM, create_engine
from gateway.home import Home
from gateway.installation.items import read_number, read_stored, report_home
from gateway.installation.merge import Kind, Merger, file_names
from gateway.installation.model_versions import (
    UNDER_WAY,
    ModelVersion,
    RunningModels,
    running_release,
)
from gateway.secret import Secret, SecretError
from gateway.settings.file import SettingsError, one_line
from gateway.settings.load import Settings
from gateway.worker.work_listener import WorkListener

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Between two looks at the number: a change is in force at all workers within two seconds."""
HEARD_LOOK_S = 20.0
"""Between two looks of who hears of each change; a lost notification costs as much."""
WORK = "stored settings"
"""The topic of the trigger on their number."""
REPORT_S = 20.0
"""A home is said to run at least so often (`items.HOME_SEEN`)."""
UNDER_WAY_S = 1.0
"""Between two looks at the models while another version of one starts."""

ReloadAll = Callable[[], Awaitable[str]]
"""Puts what the file and Postgres say in force; returns why not, else an empty text."""
_Report = tuple[int, str, dict[Kind, list[str]], RunningModels]
"""The report of a home, as `report_home` takes it."""


class StoredSettingsFollower:
    """Follows for one home, by its name. `secret_file`: of the installation; it is read at each
    merge, for its keys may change. `clock`: monotonic seconds."""

    def __init__(
        self,
        db: AsyncEngine,
        home: str,
        secret_file: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._db, self._home, self._secret_file, self._clock = db, home, secret_file, clock
        self._merged = 0
        """The number of what was merged last; 0: nothing is stored."""
        self._number = 0
        """The number of the last settings of which it is known whether they are in force."""
        self._file_names: dict[Kind, list[str]] = {}
        self._problem = ""
        self.versions: Callable[[], Sequence[ModelVersion]] = lambda: ()
        """Returns the versions of the models here; called for each report."""
        self._is_under_way = False
        self._reported: _Report | None = None
        self._reported_at = 0.0
        self.reporting = Periodic(
            "report of a home",
            lambda: UNDER_WAY_S if self._is_under_way else REPORT_S,
            self.report,
            log=log,
            failure="it is not said which settings and models are in force here",
            expected=(OSError, SQLAlchemyError),
        )
        """Reports while a reload takes its time, and at once when it is woken."""

    async def merged_into(self, settings: Settings) -> Settings:
        """Return the settings of the file with those that are stored. Raises: SettingsError,
        OSError, sqlalchemy.exc.SQLAlchemyError."""
        async with self._db.connect() as conn:
            stored = await read_stored(conn)
        self._merged, self._file_names = stored.number, file_names(settings)
        try:
            secret = await asyncio.to_thread(Secret.load, self._secret_file)
        except SecretError as error:
            raise SettingsError(str(error)) from None
        return Merger(self._home, secret).merged(settings, stored.items, self._file_names)

    def note(self, problem: str) -> None:
        """Note what came of the settings that were merged last; empty: they are in force."""
        self._problem, self._number = problem, self._merged
        self.reporting.wake()

    def following(self, reload_all: ReloadAll, listener: WorkListener) -> Periodic:
        """Return what looks again and again: when `listener` hears of a change, and where it hears
        nothing, every LOOK_S."""
        looking = Periodic(
            "follow stored settings",
            lambda: HEARD_LOOK_S if listener.is_hearing else LOOK_S,
            lambda: self.look(reload_all),
            log=log,
            failure="stored settings are not looked at",
            expected=(OSError, SQLAlchemyError),
        )
        listener.watch(WORK, looking.wake)
        return looking

    async def look(self, reload_all: ReloadAll) -> None:
        """Look once. Raises: OSError, sqlalchemy.exc.SQLAlchemyError."""
        found = self._found()
        async with self._db.begin() as conn:
            number = await read_number(conn)
            if number == self._number and found == self._reported and self._is_report_due():
                await report_home(conn, self._home, *found)
                self._reported_at = self._clock()
        if number != self._number:
            self.note(await reload_all())
            # What could not even be read is not tried again at each look, but at its next change.
            self._number = max(self._number, number)
        await self.report()

    async def report(self) -> None:
        """Report what is in force, where that is news or was said long ago. Raises: OSError,
        sqlalchemy.exc.SQLAlchemyError."""
        found = self._found()
        if found != self._reported or self._is_report_due():
            async with self._db.begin() as conn:
                await report_home(conn, self._home, *found)
            self._reported, self._reported_at = found, self._clock()

    def _found(self) -> _Report:
        models = tuple(self.versions())
        self._is_under_way = any(each.state in UNDER_WAY for each in models)
        running = RunningModels(release=running_release(), models=models)
        return self._number, self._problem, self._file_names, running

    def _is_report_due(self) -> bool:
        return self._clock() - self._reported_at > REPORT_S - BEAT_S


def with_stored(settings: Settings) -> Settings:
    """Return `settings` with those that are stored, for a start; without them, and the reason in
    the log, where they do not fit or Postgres does not answer. Blocks."""

    async def read() -> Settings:
        assert settings.database_url is not None
        db = create_engine(settings.database_url, role=ROLE_SYSTEM, pool_size=1)
        home = Home(settings.home).name
        try:
            follower = StoredSettingsFollower(db, home, settings.secret_key_file)
            return await follower.merged_into(settings)
        finally:
            await db.dispose()

    try:
        return asyncio.run(read())
    except (SettingsError, OSError, SQLAlchemyError) as error:
        problem = one_line(str(getattr(error, "orig", None) or error))
        log.warning("stored settings are not in force, the file's are: %s", problem)
        return settings
