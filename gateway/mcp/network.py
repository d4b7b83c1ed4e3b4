"""Dials MCP servers at checked addresses alone, by what the operator allows of each. A server's
name is looked up once for a connection; one forbidden address among the answers forbids it, and a
name that means another address a moment later is not asked again. To the bridge a forbidden address
is a connection that fails."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpcore

from gateway.net.egress import (
    RESOLVER_THREADS,
    CheckedNetwork,
    EgressError,
    ForbiddenTarget,
    Resolve,
    lookup_on,
    public_trust,
)
from mcp_bridge.upstream.network import AsyncioNetwork
from mcp_bridge.upstream.upstream import Addresses


class ForbiddenAddress(httpcore.ConnectError):
    """A server's name leads where it may not; callers are told its own name."""


class NoAddress(httpcore.ConnectError):
    pass


class UpstreamNetwork(CheckedNetwork):
    """A network of checked addresses whose errors are those of a network."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            return await super().connect_tcp(host, port, timeout, local_address, socket_options)
        except ForbiddenTarget as error:
            raise ForbiddenAddress(str(error)) from error
        except EgressError as error:
            raise NoAddress(str(error)) from error


class UpstreamNetworks:
    """The networks, one for each kind of address. `allow_loopback`: for all of them, in
    development."""

    def __init__(self, resolve: Resolve, *, allow_loopback: bool = False) -> None:
        self.trust: ssl.SSLContext = public_trust()
        self._by_kind: dict[Addresses, UpstreamNetwork] = {
            kind: UpstreamNetwork(
                AsyncioNetwork(),
                resolve,
                allow_loopback=allow_loopback or kind == "loopback",
                allow_private=kind == "private",
            )
            for kind in ("public", "private", "loopback")
        }

    def of(self, kind: Addresses) -> httpcore.AsyncNetworkBackend:
        return self._by_kind[kind]


def open_networks(stack: ExitStack, *, allow_loopback: bool) -> UpstreamNetworks:
    """Open the networks; their threads end with `stack`."""
    threads = ThreadPoolExecutor(RESOLVER_THREADS, thread_name_prefix="mcp-resolver")
    stack.callback(threads.shutdown, wait=False, cancel_futures=True)
    return UpstreamNetworks(lookup_on(threads), allow_loopback=allow_loopback)
