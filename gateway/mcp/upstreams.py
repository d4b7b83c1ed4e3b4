"""Reaches the servers of the settings: over checked addresses, or as processes."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from foundation.http1 import ConnectError, Resolver
from gateway.home import Home
from gateway.net.egress import (
    RESOLVER_THREADS,
    CheckedResolver,
    EgressError,
    ForbiddenTarget,
    Resolve,
    lookup_on,
    public_trust,
)
from gateway.settings.load import Settings
from mcp_bridge.upstream.credentials import Credentials
from mcp_bridge.upstream.stdio.isolation import OwnUid, choose_isolation
from mcp_bridge.upstream.stdio.process import Launcher
from mcp_bridge.upstream.stdio.stderr_tail import LastWords
from mcp_bridge.upstream.transports.factory import Transports
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


@contextmanager
def open_transports(
    settings: Settings,
    credentials: Credentials | None = None,
    on_end: Callable[[LastWords], None] | None = None,
) -> Iterator[Transports]:
    """Open the transports. `on_end`: is told how each process of a server ended."""
    with ExitStack() as stack:
        resolvers = open_resolvers(stack, allow_loopback=settings.egress_to_loopback)
        yield Transports(
            resolver_of=resolvers.of,
            trust=resolvers.trust,
            credentials=credentials,
            launcher=launcher_of(settings),
            idle_stop_s=settings.mcp.stdio.idle_stop_s,
            on_end=on_end,
        )


def launcher_of(settings: Settings) -> Callable[[], Launcher]:
    """Return a function that makes the launcher for the first server process: it ends what a dead
    gateway left running, and tries whether it can isolate processes. It blocks meanwhile. Raises:
    StdioError."""
    written = settings.mcp.stdio

    def open_launcher() -> Launcher:
        isolation = choose_isolation(written.isolation, written.uids)
        if isinstance(isolation, OwnUid):
            isolation.leases.sweep()
        return Launcher(isolation, written.scratch or Home(settings.home).root / "mcp")

    return open_launcher
