"""Adds what one worker counted of its rollouts to what all did, and lets that decide: while a
rollout is under way, every LOOK_S.

A worker that ends takes the counts of its last second along, those of either version alike. What
is decided is heard of as any change of versions is, by the worker that decided, too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from foundation.periodic import Periodic
from gateway.db import tenant
from gateway.fleet.router import Fleet
from gateway.registry.rollout import ModelRollout
from gateway.registry.rollout_changes import add_outcomes, look_at
from gateway.registry.version_table import RolloutShare
from gateway.tenancy.errors import NotFound

log = logging.getLogger(__name__)

LOOK_S = 1.0
REST_S = 300.0
"""Without a rollout nobody looks, until the versions are read anew."""
ABSENT_S = 60.0
"""A version is gone when the settings have not had it for so long: workers and homes take new
settings up one after the other."""


class RolloutLooks:
    """The looks of one worker. `db`: of a role that sees the installation's tables."""

    def __init__(
        self, db: AsyncEngine, fleet: Fleet, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._db, self._fleet, self._clock = db, fleet, clock
        self._absent_since: dict[str, float] = {}
        """By the ids of rollouts whose new version does not stand in the settings."""
        self._looking = Periodic(
            "look at rollouts",
            lambda: LOOK_S if fleet.versions.shares else REST_S,
            self.look,
            log=log,
            failure="rollouts are not looked at: they stay as they are",
            expected=(OSError, SQLAlchemyError),
        )

    def wake(self) -> None:
        """Look soon: there may be another rollout."""
        self._looking.wake()

    async def look(self) -> None:
        """Raises: OSError, SQLAlchemyError."""
        shares = self._fleet.versions.shares
        self._note_absent(shares)
        for share in shares:
            await self._look_at(share)

    def _note_absent(self, shares: Iterable[RolloutShare]) -> None:
        now = self._clock()
        self._absent_since = {
            share.rollout.id: self._absent_since.get(share.rollout.id, now)
            for share in shares
            if self._fleet.route_of(share.new_version.served_by) is None
        }

    async def _look_at(self, share: RolloutShare) -> None:
        rollout, taken = share.rollout, share.tally.take()
        try:
            if taken:
                async with self._db.begin() as conn:
                    await add_outcomes(conn, rollout, taken)
        except BaseException:
            share.tally.give_back(taken)
            raise
        now = self._clock()
        is_served = now - self._absent_since.get(rollout.id, now) < ABSENT_S
        try:
            async with tenant(self._db, rollout.operator_org) as conn:
                changed = await look_at(conn, rollout.id, is_served=is_served)
        except NotFound:
            return  # it was removed just now
        if changed is not None:
            tell(*changed)

    def start(self) -> None:
        self._looking.start()

    async def close(self) -> None:
        await self._looking.close()


def tell(before: ModelRollout, after: ModelRollout) -> None:
    """Log what became of a rollout."""
    if (before.state, before.step) == (after.state, after.step):
        return
    level = logging.WARNING if after.state == "taken_back" else logging.INFO
    what = f"is at {after.percent} %" if after.is_active else after.state.replace("_", " ")
    log.log(
        level,
        "rollout of version %d of %s %s: %s",
        *(after.to_version, after.model, what, after.reason or "its step is over"),
    )
