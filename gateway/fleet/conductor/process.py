"""Runs the conductor: `python -m gateway conductor --index PATH --engine ADDRESS ...`.

It hears what the engines of a home have cached and writes it where the workers read it. No request
waits for it: while it is away they go by the table that it left, and by what they sent themselves.
Knows no tenant and no prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from engine.transport.client import EngineClient
from foundation import logs
from gateway.fleet.conductor.followers import CacheFollower
from gateway.fleet.conductor.index_writer import KvIndexWriter

log = logging.getLogger(__name__)

PUBLISH_AFTER_S = 2.0
"""A fresh table is shown after so long at the latest, though an engine did not tell what it has."""
SIGN_OF_LIFE_S = 1.0


class Conductor:
    """Follows the engines at these addresses and writes the index at `path`."""

    def __init__(self, path: Path, addresses: Sequence[str]) -> None:
        self._index = KvIndexWriter(path)
        self._unknown = set(addresses)
        """The engines that have not told yet what they have."""
        self._all_known = asyncio.Event()
        self._clients = [
            EngineClient(
                address,
                cache_hearer=CacheFollower(
                    address, self._index, on_known=partial(self._know, address)
                ),
            )
            for address in addresses
        ]

    async def run(self) -> None:
        """Follow until cancelled."""
        for client in self._clients:
            client.start()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PUBLISH_AFTER_S):
                    await self._all_known.wait()
            self._index.told()
            self._index.publish()
            log.info("the index of cached prefixes is there, %d spans", self._index.num_spans)
            while True:
                await asyncio.sleep(SIGN_OF_LIFE_S)
                self._index.told()
        finally:
            await asyncio.gather(*(client.close() for client in self._clients))

    def _know(self, address: str) -> None:
        self._unknown.discard(address)
        if not self._unknown:
            self._all_known.set()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gateway conductor")
    parser.add_argument("--index", type=Path, required=True)
    parser.add_argument("--engine", action="append", required=True, dest="engines")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", choices=("json", "human"), default="human")
    arguments = parser.parse_args(sys.argv[2:])
    logs.configure(
        arguments.log_level, json_lines=arguments.log_format == "json", process="conductor"
    )
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_run_until_stopped(arguments.index, arguments.engines))


async def _run_until_stopped(path: Path, addresses: Sequence[str]) -> None:
    running = asyncio.current_task()
    assert running is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    await Conductor(path, addresses).run()
