"""The socket that all workers share, and how a client on this machine names it.

Knows no HTTP.
"""

from __future__ import annotations

import socket
from errno import EADDRINUSE
from ipaddress import ip_address

WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class AddressError(Exception):
    """Nobody can listen there as asked; one line that names the address."""


def bind(
    host: str,
    port: int,
    *,
    fields: str = "host, port",
    hint: str = "--port or TOLLGATE_PORT chooses another",
) -> socket.socket:
    """A bound socket that does not listen yet: a client is refused until a worker accepts.
    `fields` and `hint`: where the address is set, for the error.

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
        advice = f"; {hint}" if error.errno == EADDRINUSE else ""
        raise AddressError(f"{fields}: {host}:{port}: {error.strerror}{advice}") from None
    return listener


def bind_metrics(host: str, port: int | None, beside: socket.socket) -> socket.socket | None:
    """Bind the listener of metrics and health, where they have one. `beside`: the other listener,
    whose port is another one: a request tells by its port which it came by. Raises: AddressError.
    """
    if port is None:
        return None
    fields, hint = "metrics.host, metrics.port", "metrics.port chooses another"
    if port == local_address(beside)[1]:
        raise AddressError(f"{fields}: {host}:{port}: the port of everything else; {hint}")
    return bind(host, port, fields=fields, hint=hint)


def bound_unread(listener: socket.socket, timeout_s: float) -> None:
    """Connections that are accepted from now on are closed by the kernel when what was sent stays
    unread, or unacknowledged, for `timeout_s`. A server cannot do this by itself: closing a
    connection waits until what is buffered for the peer has left, and a peer that reads nothing
    would hold its file descriptor for as long as it likes."""
    timeout_ms = round(timeout_s * 1000)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)


def local_address(listener: socket.socket) -> tuple[str, int]:
    """Return (host, port) that reach it from this machine."""
    host, port = listener.getsockname()[:2]
    return WILDCARDS.get(host, host), port


def base_url(listener: socket.socket) -> str:
    """Return what the official SDK takes as its `base_url` on this machine."""
    return f"{origin(*local_address(listener))}/v1"


def origin(host: str, port: int) -> str:
    """The address as a client on this machine writes it in front of a path."""
    host = WILDCARDS.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(host: str) -> bool:
    """True for a host of this machine; `host`: as in a URL, without brackets."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
