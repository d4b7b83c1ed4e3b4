"""What one worker process is made of once it is wired: data for the routes to reach. `app` makes
it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.spool import Spool
from billing.worker import Shipper
from engine.client import Engine
from gateway.auth.api_keys import Authenticator
from gateway.inference import Desk
from gateway.readiness import Readiness
from gateway.telemetry import Telemetry


class Services(msgspec.Struct, frozen=True, kw_only=True):
    desk: Desk
    telemetry: Telemetry
    readiness: Readiness
    authenticator: Authenticator
    db: AsyncEngine
    spool: Spool
    shipper: Shipper
    engines: Mapping[str, Engine]
    """By model name."""
    started_at: int
    """Unix seconds."""

    def observe(self) -> None:
        """Bring the gauges up to date, right before they are read."""
        for engine in self.engines.values():
            if engine.connected:
                self.telemetry.engine_status(engine.status)
        self.telemetry.spool_backlog.set(self.spool.backlog)
        self.telemetry.usage_conflicts.set(self.shipper.alarms.conflicts)
        self.telemetry.usage_refused.set(self.shipper.alarms.refused)
