"""How long after a client hung up its upstream hears of it: the far end's connection is closed.

The client and the upstream are both here, in one process and by one clock; what is measured lies
between them.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import cast

from bench.tools.load import Connection, Target, percentiles_ms
from bench.tools.stub_upstream import PIECES

GAP_S = 0.01
NUM_EVENTS_SEEN = 3
TIMEOUT_S = 5.0
SEED = 2026


class Endless(asyncio.Protocol):
    """Writes an event each GAP_S until its peer goes; one stream at a time tells of that."""

    left: asyncio.Future[float]

    @classmethod
    def expect(cls) -> asyncio.Future[float]:
        """When the next stream's peer goes, as `time.perf_counter` counts."""
        cls.left = asyncio.get_running_loop().create_future()
        return cls.left

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._next: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it

    def data_received(self, data: bytes) -> None:
        if self._next is None:
            self._write(PIECES[0])

    def _write(self, piece: bytes) -> None:
        assert self._transport is not None
        self._transport.write(piece)
        loop = asyncio.get_running_loop()
        self._next = loop.call_later(GAP_S, self._write, PIECES[1])

    def connection_lost(self, exc: Exception | None) -> None:
        if self._next is not None:
            self._next.cancel()
            if not self.left.done():
                self.left.set_result(time.perf_counter())


async def cancel_ms(target: Target, upstream_port: int, *, trials: int) -> dict[str, float]:
    """`target`: through it a model whose upstream listens, from now on, at `upstream_port`.

    Raises: TimeoutError where one hears nothing of the other for TIMEOUT_S.
    """
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Endless, "127.0.0.1", upstream_port)
    moments = random.Random(SEED)
    took_s: list[float] = []
    try:
        for _ in range(trials):
            left = Endless.expect()
            connection = await Connection.open(target)
            asked = asyncio.create_task(connection.ask(target.request()))
            async with asyncio.timeout(TIMEOUT_S):
                while connection.num_events < NUM_EVENTS_SEEN:
                    await asyncio.sleep(GAP_S)
            await asyncio.sleep(moments.uniform(0, GAP_S))
            hung_up_at = time.perf_counter()
            connection.close()
            async with asyncio.timeout(TIMEOUT_S):
                took_s.append(await left - hung_up_at)
            await asyncio.gather(asked, return_exceptions=True)
    finally:
        server.close()
    return percentiles_ms(took_s)
