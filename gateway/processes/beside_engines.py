"""Keeps running what stands beside engines, each while settings ask for it: the conductor that
follows them, the relay to which engines of other machines come, who lends engines to other cells,
and the launcher that speaks with Ray.
"""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial

from gateway.fleet.cells.lending_plan import LendingConfig, lending_of, write_lending
from gateway.fleet.joining.admission import JoinableModel, JoinConfig, write_config
from gateway.fleet.joining.launch_plan import LaunchPlan, plan_of, write_plan
from gateway.home import Home
from gateway.net.listener import AddressError, bind
from gateway.processes.child_processes import Child, spawn
from gateway.processes.restarter import Restarter
from gateway.settings.child_environment import engine_environment
from gateway.settings.file import SettingsError
from gateway.settings.load import Settings, own_environment
from gateway.settings.models import ModelConfig

CONDUCTOR_STOP_S = 2.0
RAYS_OWN = re.compile(r"RAY_\w+")
"""Variables by which a process finds its cluster and speaks with it."""
LAUNCHER_STOP_S = 20.0
"""It ends what it started, and each engine what it runs."""


class ConductorPlace:
    """Keeps the conductor of a home running, which shows the workers what engines have cached:
    while there are engines to choose from. No request waits for it."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self.restarter: Restarter | None = None
        self._addresses: list[str] = []
        self._turn = asyncio.Lock()

    async def follow(self, addresses: list[str], settings: Settings) -> None:
        """Have it follow these engines, and no others."""
        async with self._turn:
            if addresses == self._addresses:
                return
            await self.stop()
            self._addresses = addresses
            if addresses:
                self.restarter = Restarter("conductor", partial(self._start, addresses, settings))
                await self.restarter.begin_or_retry()

    async def stop(self) -> None:
        if self.restarter is not None:
            await self.restarter.stop(CONDUCTOR_STOP_S)
            self.restarter = None

    async def _start(self, addresses: list[str], settings: Settings) -> Child:
        command = [sys.executable, "-m", "gateway", "conductor"]
        return spawn(
            "conductor",
            [
                *(*command, "--index", str(self._home.kv_index)),
                *(f"--engine={each}" for each in addresses),
                *("--log-level", settings.log_level, "--log-format", settings.logs.format),
            ],
            run=self._home.run,
            log=self._home.logs / "conductor.log",
            env=engine_environment(own_environment(), settings),
        )


class RelayPlace:
    """Keeps the relay of a home running, to which engines of other machines come: while some may
    join. It holds the socket, so that who comes while the relay is started again waits."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self.restarter: Restarter | None = None
        self._address: str | None = None
        self._listener: socket.socket | None = None
        self._config: JoinConfig | None = None

    async def follow(self, settings: Settings) -> None:
        """Let engines join as the settings have it. Raises: SettingsError, where nobody can listen
        as they say; OSError."""
        joinable = [each for each in settings.models if each.joined or each.borrowed]
        config = JoinConfig(
            models=tuple(map(JoinableModel.of, joinable)),
            bytes_per_s=settings.fleet.join_bytes_per_s,
            round_trips=self._home.round_trips if any(e.borrowed for e in joinable) else None,
        )
        address = settings.fleet.join_listen if joinable else None
        if (config, address) == (self._config, self._address):
            return
        fresh = None if address in (None, self._address) else self._bind(address)
        if address != self._address:
            await self.stop()
        if address is not None:
            write_config(self._home.join_config, config)
        self._config, self._address = config, address
        if fresh is not None:
            self._listener = fresh
            self.restarter = Restarter("join", partial(self._start, settings, fresh))
            await self.restarter.begin()
        elif self.restarter is not None and self.restarter.child is not None:
            self.restarter.child.send_signal(signal.SIGHUP)

    def _bind(self, address: str) -> socket.socket:
        host, _, port = address.removeprefix("tcp:").rpartition(":")
        fields, hint = "fleet.join_listen", "it chooses another"
        try:
            return bind(host.strip("[]"), int(port), fields=fields, hint=hint)
        except AddressError as error:
            raise SettingsError(str(error)) from None

    @property
    def port(self) -> int | None:
        """Return where engines come; None: none may."""
        return None if self._listener is None else int(self._listener.getsockname()[1])

    async def stop(self) -> None:
        self._address, self._config = None, None
        if self.restarter is not None:
            await self.restarter.stop(CONDUCTOR_STOP_S)
            self.restarter = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _start(self, settings: Settings, listener: socket.socket) -> Child:
        home = self._home
        return spawn(
            "join",
            [
                *(sys.executable, "-m", "gateway", "join", "--listen-fd", str(listener.fileno())),
                *("--folder", str(home.join), "--config", str(home.join_config)),
                *("--log-level", settings.log_level, "--log-format", settings.logs.format),
            ],
            run=home.run,
            log=home.logs / "join.log",
            env=engine_environment(own_environment(), settings),
            pass_fds=(listener.fileno(),),
        )


class LenderPlace:
    """Keeps the process running that lends engines of a home to other cells, while settings want
    that."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._config: LendingConfig | None = None
        self.restarter: Restarter | None = None
        self._turn = asyncio.Lock()

    async def follow(self, models: Sequence[ModelConfig], settings: Settings) -> None:
        """Lend the engines of models as the settings have it. Raises: OSError."""
        async with self._turn:
            config = lending_of(models, settings.cell)
            before, self._config = self._config, config
            if config == before:
                return
            if config is None:
                await self.stop()
                return
            write_lending(self._home.lending_config, config)
            if self.restarter is None:
                self.restarter = Restarter("lend", partial(self._start, settings))
                await self.restarter.begin_or_retry()
            elif self.restarter.child is not None:
                self.restarter.child.send_signal(signal.SIGHUP)

    async def stop(self) -> None:
        self._config = None
        if self.restarter is not None:
            await self.restarter.stop(CONDUCTOR_STOP_S)
            self.restarter = None

    async def _start(self, settings: Settings) -> Child:
        home = self._home
        return spawn(
            "lend",
            [
                *(sys.executable, "-m", "gateway", "lend", "--folder", str(home.lending)),
                *("--config", str(home.lending_config)),
                *("--log-level", settings.log_level, "--log-format", settings.logs.format),
            ],
            run=home.run,
            log=home.logs / "lend.log",
            env=engine_environment(own_environment(), settings),
        )


class RayPlace:
    """Keeps the launcher of a home running, the one process that speaks with Ray, while settings
    want engines there. With it they end: Ray ends what a process started that is gone."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._plan: LaunchPlan | None = None
        self.restarter: Restarter | None = None
        self._turn = asyncio.Lock()

    async def follow(self, settings: Settings, join_port: int | None) -> None:
        """Have engines run on Ray as the settings have it. `join_port`: where they come; None:
        nowhere. Raises: OSError."""
        async with self._turn:
            plan = None if join_port is None else plan_of(settings, join_port)
            before, self._plan = self._plan, plan
            if plan == before:
                return
            if plan is None:
                await self.stop()
                return
            write_plan(self._home.ray_plan, plan)
            if self.restarter is not None and before is not None:
                if plan.cluster == before.cluster:
                    if self.restarter.child is not None:
                        self.restarter.child.send_signal(signal.SIGHUP)
                    return
                await self.stop()
                self._plan = plan
            self.restarter = Restarter("ray", partial(self._start, settings))
            await self.restarter.begin_or_retry()

    async def stop(self) -> None:
        self._plan = None
        if self.restarter is not None:
            await self.restarter.stop(LAUNCHER_STOP_S)
            self.restarter = None

    async def _start(self, settings: Settings) -> Child:
        home, environ = self._home, own_environment()
        rays = {name: value for name, value in environ.items() if RAYS_OWN.fullmatch(name)}
        return spawn(
            "ray",
            [
                *(sys.executable, "-m", "gateway", "ray"),
                *("--folder", str(home.join), "--plan", str(home.ray_plan)),
                *("--log-level", settings.log_level, "--log-format", settings.logs.format),
            ],
            run=home.run,
            log=home.logs / "ray.log",
            env=engine_environment(environ, settings, **rays),
        )
