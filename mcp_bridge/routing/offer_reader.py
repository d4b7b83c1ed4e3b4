"""A look at what a server offers now, for whoever is to approve it: past the guard, once.

Nothing is kept: a session that is needed is begun for this, and ended.
"""

from __future__ import annotations

import asyncio
from typing import Any

from mcp_bridge.caller import Caller
from mcp_bridge.pinning import Offer, offer_of
from mcp_bridge.protocol.envelope import Envelope
from mcp_bridge.protocol.eras import MODERN
from mcp_bridge.routing.catalog import check_definition
from mcp_bridge.routing.endpoint import ClientContext, Endpoint
from mcp_bridge.routing.exchanges import SessionSource
from mcp_bridge.routing.guard import Guard
from mcp_bridge.upstream.credentials import UpstreamOwner
from mcp_bridge.upstream.transports.factory import Transports
from mcp_bridge.upstream.upstream import ServerConfig, Upstream, UpstreamSession

NOBODY = Caller(org_id="", project_id="", subject="", client="")


class OneSession(SessionSource):
    """The session of one look."""

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope
        self.session: UpstreamSession | None = None

    async def get(self, upstream: Upstream) -> UpstreamSession:
        if self.session is None:
            self.session, _ = await upstream.initialize(self._envelope)
        return self.session

    async def replace(self, upstream: Upstream, ended: UpstreamSession) -> UpstreamSession:
        self.session = None
        return await self.get(upstream)


async def read_offer(
    config: ServerConfig,
    info: dict[str, Any],
    transports: Transports | None = None,
    org_id: str = "",
    *,
    close: bool = True,
) -> Offer:
    """Return what a server offers, as the tenant is shown it.

    `close`: the transports, too. Raises: RpcError, where the server gives no usable answer;
    NotPinnable, for too much.
    """
    transports = transports or Transports()
    transport = transports.open(config, UpstreamOwner(org_id))
    upstream = Upstream(config, info, transport)
    envelope = Envelope(version=MODERN, capabilities={}, info=info)
    sessions = OneSession(envelope)
    context = ClientContext(
        caller=NOBODY,
        endpoint=Endpoint(key="", upstreams=(upstream,), keeps_names=True),
        envelope=envelope,
        sessions=sessions,
        guard=Guard(),
    )
    try:
        fetched = await context.fetch(upstream)
        if sessions.session is not None:
            await upstream.end(sessions.session)
    finally:
        await upstream.close()
        if close:
            await transports.close()
    return await asyncio.to_thread(offer_of, fetched.things, check_definition)
