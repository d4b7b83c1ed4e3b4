"""Lets gateways come to an engine: here by an address that it listens on. It can also dial one of
another machine (`engine.transport.joining`).

Knows neither the protocol nor what is served.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import logging
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from engine.errors import ConfigError
from engine.transport.frames import READ_AHEAD_BYTES, TcpAddress, UnixAddress, parse_address

log = logging.getLogger(__name__)

ServeConnection = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Serves one gateway until it leaves."""
Refused = Callable[[ConfigError], None]
"""Hears that nobody will ever come by an entrance that was open."""
SocketFile = tuple[int, int, int]
"""Device, inode and time of birth: the number of an inode that is gone is soon given away again."""


class Entrance(Protocol):
    """The way by which gateways come to an engine."""

    @property
    def address(self) -> str:
        """Return where gateways find the engine."""

    async def open(self, serve: ServeConnection, refused: Refused) -> None:
        """Let gateways come, each of which is served. Raises `ConfigError`."""

    def shut(self) -> None:
        """Let nobody come any more; who is there stays. A second call changes nothing."""

    async def close(self) -> None:
        """Leave nothing behind. Everybody has left."""


class ListeningEntrance:
    """Listens on an address, `unix:/path` or `tcp:host:port` (port 0: any free one)."""

    def __init__(self, address: str) -> None:
        self._listen_address = parse_address(address)
        self._socket_file: SocketFile | None = None
        self._listener: asyncio.Server | None = None

    @property
    def address(self) -> str:
        """As `EngineClient` takes it."""
        if isinstance(self._listen_address, TcpAddress):
            assert self._listener is not None
            _, port = self._listener.sockets[0].getsockname()[:2]
            return str(TcpAddress(self._listen_address.host, port))
        return str(self._listen_address)

    async def open(self, serve: ServeConnection, refused: Refused) -> None:
        address = self._listen_address
        try:
            if isinstance(address, UnixAddress):
                bound = bind_unix(address)
                self._socket_file = socket_file(Path(address.path))
                self._listener = await asyncio.start_unix_server(
                    serve, sock=bound, limit=READ_AHEAD_BYTES
                )
                return
            if not is_loopback(address.host):
                log.warning("%s is open to the network and asks for no credentials", address)
            self._listener = await asyncio.start_server(
                serve, address.host, address.port, limit=READ_AHEAD_BYTES
            )
        except OSError as error:
            raise ConfigError(f"cannot listen on {address}: {error}") from error

    def shut(self) -> None:
        if self._listener is not None:
            self._listener.close()

    async def close(self) -> None:
        self.shut()
        if isinstance(self._listen_address, UnixAddress):
            path = Path(self._listen_address.path)
            # Since it was shut nobody listens here: a successor may have taken the place.
            if self._socket_file is not None and socket_file(path) == self._socket_file:
                path.unlink(missing_ok=True)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: where it leads is not known here
        return False


def is_local(address: str) -> bool:
    """Whether what is sent to an address stays on this machine. Raises ConfigError."""
    parsed = parse_address(address)
    return isinstance(parsed, UnixAddress) or is_loopback(parsed.host)


def this_host() -> str:
    """Name this machine for as long as it runs; a container has a name of its own."""
    booted = Path("/proc/sys/kernel/random/boot_id").read_text()
    return hashlib.blake2b(f"{booted}{socket.gethostname()}".encode(), digest_size=8).hexdigest()


def socket_file(path: Path) -> SocketFile | None:
    """Return which file stands at `path`; None if there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def bind_unix(address: UnixAddress) -> socket.socket:
    """A bound socket that only this user can open; replaces what a dead engine left behind.

    Raises `OSError`; `ConfigError` when an engine is alive there.
    """
    path = Path(address.path)
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(address.path)
                raise ConfigError(f"cannot listen on {address}: another process does")
            except ConnectionRefusedError:
                path.unlink()
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(0o177)
    try:
        bound.bind(address.path)
    except OSError:
        bound.close()
        raise
    finally:
        os.umask(umask)
    return bound
