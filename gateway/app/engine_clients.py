"""Connects the clients of this installation's engines, for as long as it takes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import partial

from engine.errors import EngineUnavailable
from engine.transport.client import EngineClient
from gateway.cache_report.leases import CacheLeases, place_of
from gateway.inference.settlement import CrashSettlement
from gateway.settings.load import Settings

log = logging.getLogger(__name__)

ENGINE_WAIT_S = 10.0


def connect_engines(
    settings: Settings, settlement: CrashSettlement, leases: CacheLeases
) -> dict[str, EngineClient]:
    """Return a client for each in-repo model; each connects from now on."""
    places = {model.name: model.engine for model in settings.models if model.engine is not None}
    engines = {
        name: EngineClient(
            address,
            on_orphan=partial(settlement.orphaned, name),
            on_lease=partial(leases.heard, place_of(address)),
        )
        for name, address in places.items()
    }
    leases.watch({place_of(address): engines[name] for name, address in places.items()})
    for client in engines.values():
        client.start()
    return engines


async def await_engines(engines: Iterable[EngineClient]) -> None:
    """Accept nobody before the engines answer, so that a worker which replaces another refuses no
    request that the other would have served; but start all the same where an engine is away."""
    try:
        async with asyncio.timeout(ENGINE_WAIT_S):
            await asyncio.gather(*(engine.wait_connected(ENGINE_WAIT_S) for engine in engines))
    except (TimeoutError, EngineUnavailable):
        log.warning("starting without every engine")
