"""A real server of S3 (moto's, in a process of its own), and a road to it that can be cut."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import requests

from bench.tools.ports import free_port
from gateway.settings.file import FileStoreConfig

START_TIMEOUT_S = 60.0
ACCESS_KEY, SECRET_KEY = "test-access", "test-secret"
PIECE_BYTES = 65536
_numbers = count(1)


class ObjectStore:
    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with suppress(requests.ConnectionError):
                requests.get(f"{self.url}/moto-api/", timeout=60)
                return
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.05)

    def bucket(self) -> str:
        """One of its own."""
        name = f"bucket-{next(_numbers)}"
        assert requests.put(f"{self.url}/{name}", timeout=60).ok
        return name

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Road:
    """A port that leads to the store while it is open."""

    def __init__(self, store_port: int) -> None:
        self._store_port = store_port
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0
        self.cut_after: int | None = None
        """So many bytes that are sent to the store, of all connections; then it is cut."""
        self._is_cut = False

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        self._is_cut = True
        for writer in list(self._writers):
            writer.transport.abort()

    def mend(self) -> None:
        self._is_cut, self.cut_after = False, None

    async def close(self) -> None:
        self.cut()
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection("127.0.0.1", self._store_port)
        self._writers |= {writer, back}
        both = (self._carry(reader, back, counts=True), self._carry(there, writer, counts=False))
        await asyncio.gather(*both)
        self._writers -= {writer, back}

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(PIECE_BYTES):
                if counts and self.cut_after is not None:
                    self.cut_after -= len(data)
                    if self.cut_after < 0:
                        self.cut()
                writer.write(data)
                await writer.drain()
        writer.close()


class HeldRoad:
    """One in a thread of its own, for tests without a loop."""

    def __init__(self, store_port: int) -> None:
        self.road = Road(store_port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="road")

    def __enter__(self) -> HeldRoad:
        self._thread.start()
        self._run(self.road.open())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self.road.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @contextmanager
    def cut(self) -> Iterator[None]:
        self.cut_now()
        try:
            yield
        finally:
            self.mend()

    def cut_now(self) -> None:
        self._run(self._in_loop(self.road.cut))

    def mend(self) -> None:
        self._run(self._in_loop(self.road.mend))

    async def _in_loop(self, act: Callable[[], None]) -> None:
        """Its connections belong to the loop's thread."""
        act()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(START_TIMEOUT_S)


def config(port: int, bucket: str, *, part_bytes: int) -> FileStoreConfig:
    return FileStoreConfig(
        bucket=bucket,
        endpoint=f"http://127.0.0.1:{port}",
        prefix="some/prefix",
        connect_timeout_s=1.0,
        timeout_s=2.0,
        part_bytes=part_bytes,
    )
