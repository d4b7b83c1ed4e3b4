"""Finds the addresses at which MCP servers may be dialled, by what the operator allows of each. A
server's name is looked up once for a connection; one forbidden address among the answers forbids
it, and a name that means another address a moment later is not asked again. To the bridge a
forbidden address is a connection that fails."""

from __future__ import annotations

import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from foundation.http1 import ConnectError, Resolver
from gateway.net.egress import (
    RESOLVER_THREADS,
    CheckedResolver,
    EgressError,
    ForbiddenTarget,
    Resolve,
    lookup_on,
    public_trust,
)
from mcp_bridge.upstream.upstream import Addresses


class ForbiddenAddress(ConnectError):
    """A server's name leads where it may not; callers are told its own name."""


class NoAddress(ConnectError):
    """A server's name leads nowhere."""


class UpstreamResolver(CheckedResolver):
    """A resolver whose errors are those of a connection."""

    async def addresses(self, host: str, port: int) -> list[str]:
        try:
            return await super().addresses(host, port)
        except ForbiddenTarget as error:
            raise ForbiddenAddress(str(error)) from error
        except EgressError as error:
            raise NoAddress(str(error)) from error


class UpstreamResolvers:
    """The resolvers, one for each kind of address. `allow_loopback`: for all of them, in
    development."""

    def __init__(self, resolve: Resolve, *, allow_loopback: bool = False) -> None:
        self.trust: ssl.SSLContext = public_trust()
        self._by_kind: dict[Addresses, UpstreamResolver] = {
            kind: UpstreamResolver(
                resolve,
                allow_loopback=allow_loopback or kind == "loopback",
                allow_private=kind == "private",
            )
            for kind in ("public", "private", "loopback")
        }

    def of(self, kind: Addresses) -> Resolver:
        return self._by_kind[kind].addresses


def open_resolvers(stack: ExitStack, *, allow_loopback: bool) -> UpstreamResolvers:
    """Open the resolvers; their threads end with `stack`."""
    threads = ThreadPoolExecutor(RESOLVER_THREADS, thread_name_prefix="mcp-resolver")
    stack.callback(threads.shutdown, wait=False, cancel_futures=True)
    return UpstreamResolvers(lookup_on(threads), allow_loopback=allow_loopback)
