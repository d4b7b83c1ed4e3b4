"""Has a worker take up its settings again at SIGHUP, and says what came of it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable

import msgspec

from billing.errors import PriceBookError
from engine.errors import ConfigError
from gateway.routes.shared.services import Configuration
from gateway.settings.file import SettingsError, one_line
from gateway.settings.live import WorkerReport, live_part
from gateway.settings.load import SavedSettings
from mcp_bridge.errors import BridgeError

log = logging.getLogger(__name__)

ReadAgain = Callable[[], SavedSettings]
"""Reads the settings anew. Blocks. Raises: SettingsError, OSError, ValueError, MsgspecError."""
REFUSALS = (
    *(SettingsError, ConfigError, PriceBookError, BridgeError),
    *(OSError, ValueError, msgspec.MsgspecError),
)
"""Settings are refused with one of these. Anything else is a fault, and refuses them, too."""


class SettingsFollower:
    """Follows the settings of one worker. `number`: of those in force. `report_fd`: where reports
    go; None: to the log alone."""

    def __init__(
        self,
        configuration: Configuration,
        read_again: ReadAgain,
        number: int,
        report_fd: int | None,
    ) -> None:
        self._configuration, self._read_again = configuration, read_again
        self._number, self._report_fd = number, report_fd
        self._asked = asyncio.Event()
        configuration.on_engine_released = self.report

    async def run(self) -> None:
        """Follow until cancelled."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._asked.set)
        self.report()
        while True:
            await self._asked.wait()
            self._asked.clear()
            await self._follow()

    async def _follow(self) -> None:
        try:
            saved = await asyncio.to_thread(self._read_again)
        except REFUSALS as error:
            self._refuse(self._number, error)
            return
        try:
            await self._configuration.apply(live_part(saved.settings))
        except REFUSALS as error:
            self._refuse(saved.number, error)
        except Exception as error:
            log.exception("new settings are not taken up")
            self._refuse(saved.number, error)
        else:
            self._number = saved.number
            log.info("settings %d are in force", saved.number)
            self.report()

    def _refuse(self, number: int, error: Exception) -> None:
        problem = one_line(f"{error}" or type(error).__name__)
        log.error("new settings are refused, the old ones stay: %s", problem)
        self.report(refused=number, problem=problem)

    def report(self, *, refused: int | None = None, problem: str = "") -> None:
        if self._report_fd is None:
            return
        report = WorkerReport(
            number=self._number,
            refused=refused,
            problem=problem,
            engines=tuple(sorted(self._configuration.engine_addresses)),
        )
        try:
            os.write(self._report_fd, msgspec.json.encode(report) + b"\n")
        except OSError as error:  # whoever started it is gone, and ends it by its death
            log.warning("nobody hears of the settings: %s", error)
            self._report_fd = None
