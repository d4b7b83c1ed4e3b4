"""Kills an engine that lives but does not work, so that its restarter starts it again.

Knows no request: the gateways give a hung engine up by themselves, and long before.
"""

from __future__ import annotations

import asyncio
import logging
import signal

from engine.transport.client import EngineClient
from gateway.processes.child_processes import Child
from gateway.processes.restarter import Restarter

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.5
KILL_AFTER_TIMEOUTS = 2.0
"""An engine is killed when it was silent for so many of its step timeouts. The gateways leave it
after one; what comes back between the two was only slow."""


class Watchdog:
    """Watches the one engine that `restarter` keeps running and that listens on `address`.

    `load_timeout_s`: how long a fresh one may take until it listens. Time is counted in looks: none
    passes while this process itself is held up.
    """

    def __init__(self, restarter: Restarter, address: str, *, load_timeout_s: float) -> None:
        self._restarter = restarter
        self._client = EngineClient(address)
        self._load_timeout_s = load_timeout_s
        self._child: Child | None = None
        self._known_engine = ""
        """The id of the engine heard of last: that of a child's predecessor until it listens."""
        self._heard = False
        self._away_s = 0.0

    async def run(self) -> None:
        """Watch until cancelled."""
        self._client.start()
        try:
            while True:
                await asyncio.sleep(LOOK_INTERVAL_S)
                self._look()
        finally:
            await self._client.close()

    def _look(self) -> None:
        child = self._restarter.child
        if child is not self._child:
            self._child, self._heard, self._away_s = child, False, 0.0
        if child is None:
            return
        if self._client.connected:
            engine = self._client.status.engine_id
            if self._heard or engine != self._known_engine:
                self._known_engine, self._heard, self._away_s = engine, True, 0.0
                return
        self._away_s += LOOK_INTERVAL_S
        if self._away_s >= self._patience_s():
            why = "does not work any more" if self._heard else "does not begin to listen"
            log.error("%s (pid %d) %s: killing it", child.name, child.pid, why)
            child.send_signal(signal.SIGKILL)
            self._away_s = 0.0

    def _patience_s(self) -> float:
        """Return how long the client may be without the engine: what it waited itself is over
        by then."""
        if not self._heard:
            return self._load_timeout_s
        return (KILL_AFTER_TIMEOUTS - 1) * self._client.status.step_timeout_s
