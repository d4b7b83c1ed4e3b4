"""A Unix socket that nobody else listens on, and how to tell it from its successor."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from pathlib import Path

from engine.errors import ConfigError
from engine.transport.frames import UnixAddress

SocketFile = tuple[int, int, int]
"""Device, inode and time of birth: the number of an inode that is gone is soon given away again."""


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: where it leads is not known here
        return False


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
