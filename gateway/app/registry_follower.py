"""Keeps what a worker knows of versions, pins and rollouts as it is in Postgres: read when the
worker begins to listen and when a change is committed. While nobody can be heard it is read every
POLL_S.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from foundation.periodic import Periodic
from gateway.fleet.router import Fleet
from gateway.home import Home
from gateway.registry.changes import read_table
from gateway.registry.tables import TOPIC
from gateway.registry.version_table import VersionTable
from gateway.worker.work_listener import WorkListener

log = logging.getLogger(__name__)

POLL_S = 5.0


class RegistryFollower:
    """Follows for the fleet of one worker. `db`: of a role that sees the installation's tables.
    `on_rollouts`: called after a reading where a rollout is under way."""

    def __init__(
        self,
        db: AsyncEngine,
        listener: WorkListener,
        fleet: Fleet,
        home: Home,
        on_rollouts: Callable[[], None],
    ) -> None:
        self._db, self._fleet, self._home = db, fleet, home
        self._on_rollouts = on_rollouts
        self._reading = Periodic(
            "follow model versions",
            lambda: listener.rest_s(POLL_S),
            self.read,
            log=log,
            failure="model versions are not read: those known before stay",
            expected=(OSError, SQLAlchemyError),
        )
        listener.watch(TOPIC, self._reading.wake)

    async def read(self) -> None:
        """Raises: OSError, SQLAlchemyError, msgspec.DecodeError."""
        async with self._db.connect() as conn:
            table = await read_table(conn)
        note_names_sold(self._home, table, self._fleet)
        table.go_on(self._fleet.versions)
        self._fleet.versions = table
        if table.shares:
            self._on_rollouts()

    def start(self) -> None:
        self._reading.start()

    async def close(self) -> None:
        await self._reading.close()


def note_names_sold(home: Home, table: VersionTable, fleet: Fleet) -> None:
    """Note that engines of versions are sold by the name of their model, before one serves in it:
    what they count is compared with the books by the names that they are sold by. Raises: OSError,
    msgspec.DecodeError."""
    for versioned in table.models.values():
        for version in versioned.versions.values():
            route = fleet.route_of(version.served_by)
            if route is None or route.kind != "engine":
                continue
            engines = route.parent or route.model
            if version.model not in home.names_sold(engines):
                home.note_names_sold(engines, [version.model])
