"""Has a worker take up its settings again, at SIGHUP or when somebody asks for it, and says what
came of it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from billing.errors import PriceBookError
from engine.errors import ConfigError
from gateway.routes.shared.services import Configuration
from gateway.settings.file import SettingsError, one_line
from gateway.settings.live import WorkerReport, live_part
from gateway.settings.load import SavedSettings, Settings
from mcp_bridge.errors import BridgeError

log = logging.getLogger(__name__)

ReadAgain = Callable[[], SavedSettings]
"""Reads the settings anew. Blocks. Raises: SettingsError, OSError, ValueError, MsgspecError."""
Complete = Callable[[Settings], Awaitable[Settings]]
"""Raises: SettingsError, OSError, sqlalchemy.exc.SQLAlchemyError."""
REFUSALS = (
    *(SettingsError, ConfigError, PriceBookError, BridgeError),
    *(OSError, ValueError, msgspec.MsgspecError),
)
"""Settings are refused with one of these. Anything else is a fault, and refuses them, too."""


class SettingsFollower:
    """Follows the settings of one worker. `number`: of those in force. `report_fd`: where reports
    go; None: to the log alone. `complete`: adds to settings that were read what is stored beside
    them, in a worker that does so itself."""

    def __init__(
        self,
        configuration: Configuration,
        read_again: ReadAgain,
        number: int,
        report_fd: int | None,
        complete: Complete | None = None,
    ) -> None:
        self._configuration, self._read_again = configuration, read_again
        self._number, self._report_fd, self._complete = number, report_fd, complete
        self._asked = asyncio.Event()
        self._turn = asyncio.Lock()
        configuration.on_engine_released = self.report

    async def run(self) -> None:
        """Follow until cancelled."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._asked.set)
        self.report()
        while True:
            await self._asked.wait()
            self._asked.clear()
            await self.take_up()

    async def take_up(self) -> str:
        """Take up what the settings say now, one after the other; return why not, else an empty
        text."""
        async with self._turn:
            try:
                saved = await asyncio.to_thread(self._read_again)
            except REFUSALS as error:
                return self._refuse(self._number, error)
            try:
                settings = saved.settings
                if self._complete is not None:
                    settings = await self._complete(settings)
                await self._configuration.apply(live_part(settings))
            except (*REFUSALS, SQLAlchemyError) as error:
                return self._refuse(saved.number, error)
            except Exception as error:
                log.exception("new settings are not taken up")
                return self._refuse(saved.number, error)
            self._number = saved.number
            log.info("settings %d are in force", saved.number)
            self.report()
            return ""

    def _refuse(self, number: int, error: Exception) -> str:
        problem = one_line(f"{error}" or type(error).__name__)
        log.error("new settings are refused, the old ones stay: %s", problem)
        self.report(refused=number, problem=problem)
        return problem

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
