"""A Redis of the test's own that Tollgate is told of, so that nobody but the test starts it again
once it is killed."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import redis

from gateway.home import Home
from gateway.processes import embedded_databases as embedded
from gateway.processes.child_processes import Child
from tests.scratch import make_scratch

DATA = (".aof", ".rdb", ".manifest")


class Valkey:
    """Durable, as the embedded one is."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self.url = embedded.redis_url(home)
        self._server: Child | None = None

    async def start(self, *, empty: bool = False) -> None:
        if empty:
            for path in self._home.redis.glob("**/*"):
                if path.suffix in DATA:
                    path.unlink()
        self._server = await embedded.start_redis(self._home)

    async def kill(self) -> None:
        """kill -9."""
        assert self._server is not None
        self._server.send_signal(signal.SIGKILL)
        assert await self._server.wait() == -signal.SIGKILL
        self._server = None

    async def close(self) -> None:
        if self._server is not None:
            await self.kill()

    def open_leases(self) -> int:
        """Reservations that nobody has settled."""
        with redis.Redis.from_url(self.url) as store:
            return sum(store.zcard(key) for key in store.scan_iter("tollgate:{*}:leases"))


@contextmanager
def valkey() -> Iterator[Valkey]:
    """One that is not started yet; ended and gone at the end."""
    home = Home(make_scratch())
    home.create()
    made = Valkey(home)
    try:
        yield made
    finally:
        asyncio.run(made.close())
        shutil.rmtree(home.root)
