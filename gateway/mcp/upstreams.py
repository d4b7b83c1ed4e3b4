"""Reaches the servers of the settings: over checked addresses, or as processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from gateway.home import Home
from gateway.mcp.network import open_resolvers
from gateway.settings.load import Settings
from mcp_bridge.upstream.credentials import Credentials
from mcp_bridge.upstream.stdio.isolation import OwnUid, choose_isolation
from mcp_bridge.upstream.stdio.process import Launcher
from mcp_bridge.upstream.stdio.stderr_tail import LastWords
from mcp_bridge.upstream.transports.factory import Transports


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
            idle_stop_s=settings.mcp_stdio.idle_stop_s,
            on_end=on_end,
        )


def launcher_of(settings: Settings) -> Callable[[], Launcher]:
    """Return a function that makes the launcher for the first server process: it ends what a dead
    gateway left running, and tries whether it can isolate processes. It blocks meanwhile. Raises:
    StdioError."""
    written = settings.mcp_stdio

    def open_launcher() -> Launcher:
        isolation = choose_isolation(written.isolation, written.uids)
        if isinstance(isolation, OwnUid):
            isolation.leases.sweep()
        return Launcher(isolation, written.scratch or Home(settings.home).root / "mcp")

    return open_launcher
