"""Takes up other settings in a running worker: what they change is made beside what there is, then
all of it changes at once, without an await, and what was replaced is closed when nobody uses it.

A request sees either the old settings or the new ones at each point where it looks at them: its
route, its prices and its MCP endpoint are taken once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from gateway.app.served_models import SWAP_WAIT_S, ServedModels
from gateway.cache_report.leases import CacheLeases, place_of
from gateway.home import Home
from gateway.installation.merge import Merger
from gateway.mcp.service.service import open_service, open_tool_loops
from gateway.routes.shared.services import Services
from gateway.settings.live import LiveSettings, with_live_part
from gateway.settings.load import Settings
from gateway.settings.prices import load_prices
from gateway.worker.resources import Resources

if TYPE_CHECKING:
    from gateway.auth.assembly.auth import Auth


class LiveConfiguration:
    """The settings in force in one worker. `settings`: those that it was opened with."""

    def __init__(
        self,
        settings: Settings,
        *,
        resources: Resources,
        services: Services,
        models: ServedModels,
        leases: CacheLeases,
        auth: Auth,
    ) -> None:
        self.settings = settings
        self.merger = Merger(Home(settings.home).name, resources.secret)
        self._resources, self._services = resources, services
        self._models, self._leases, self._auth = models, leases, auth
        self._mcp = services.mcp
        self._turn = asyncio.Lock()
        self.on_engine_released: Callable[[], None] = lambda: None
        models.on_retired = self._retired

    @property
    def engine_addresses(self) -> Collection[str]:
        return frozenset(self._models.clients)

    async def apply(self, live: LiveSettings) -> None:
        """Raises: SettingsError, ConfigError, PriceBookError, BridgeError, OSError, ValueError;
        then nothing has changed."""
        async with self._turn:
            settings = with_live_part(self.settings, live)
            book = await asyncio.to_thread(load_prices, settings)
            wanted = await self._models.prepare(settings, wait_s=SWAP_WAIT_S)
            try:
                if self._mcp is None and settings.mcp.servers:
                    self._mcp = await open_service(
                        settings, self._resources, self._services.generation, self._auth
                    )
                swap_mcp = None if self._mcp is None else self._mcp.prepare(settings)
            except BaseException:
                await self._models.discard(wanted)
                raise
            # There is no await from here on.
            if swap_mcp is not None:
                swap_mcp()
            self._resources.price_book.adopt(book)
            self._models.swap(wanted)
            self._follow(settings)

    def _follow(self, settings: Settings) -> None:
        services = self._services
        self.settings = settings
        services.generation.deadlines = settings.deadlines
        services.generation.slos = settings.slos
        services.telemetry.know(settings.model_names)
        services.telemetry.show_objectives(settings.slos, settings.model_names)
        services.mcp = self._mcp if settings.mcp.servers else None
        services.tool_loops = open_tool_loops(settings, services.mcp)
        services.readiness.follow()
        self._leases.follow(settings.models)
        self._watch_engines()

    def _retired(self) -> None:
        self._watch_engines()
        self.on_engine_released()

    def _watch_engines(self) -> None:
        clients = self._models.clients
        self._leases.watch({place_of(each): client for each, client in clients.items()})
