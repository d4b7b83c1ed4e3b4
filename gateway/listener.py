"""The socket that all workers share, and how a client on this machine names it.

Above: `supervisor`, `cli`. Below: the kernel. Knows no HTTP.
"""

from __future__ import annotations

import socket

WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class AddressError(Exception):
    """Nobody can listen there as asked; one line that names the address."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: a client is refused until a worker accepts.

    Raises: AddressError if it is in use, not of this machine, or not to be resolved.
    """
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise AddressError(f"host, port: {host}:{port}: {error.strerror}") from None
    return listener


def local_address(listener: socket.socket) -> tuple[str, int]:
    """(host, port) that reach it from this machine."""
    host, port = listener.getsockname()[:2]
    return WILDCARDS.get(host, host), port


def base_url(listener: socket.socket) -> str:
    """What the official SDK takes as its `base_url` on this machine."""
    host, port = local_address(listener)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
