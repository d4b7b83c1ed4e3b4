"""Decides who is told that a resource has changed, and by which server: by its owner alone.

The rules are asked as they are for a read. An owner is found by what servers list; none is asked
for what it does not list.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

from mcp_bridge.protocol.rpc import INVALID_PARAMS, METHOD_NOT_FOUND, RpcError
from mcp_bridge.routing.endpoint import ClientContext
from mcp_bridge.routing.guard import GuardedRequest, Outcome
from mcp_bridge.routing.sessions import MAX_SUBSCRIPTIONS, MAX_URI_LEN, Session, Sessions
from mcp_bridge.upstream.upstream import SETUP_TIMEOUT_S, Upstream, as_object

log = logging.getLogger(__name__)

LISTEN = "subscriptions/listen"
SUBSCRIBE, UNSUBSCRIBE = "resources/subscribe", "resources/unsubscribe"

Owned = dict[str, tuple[str, ...]]
"""URIs, by the names of the servers that have them."""


async def subscribe(
    context: ClientContext, sessions: Sessions, session: Session, params: dict[str, Any]
) -> None:
    """Subscribe the stream of the session, once its server has taken it. Raises: RpcError."""
    uri = str(params.get("uri"))
    if len(uri) > MAX_URI_LEN:
        raise RpcError(INVALID_PARAMS, f"uri: more than {MAX_URI_LEN} characters")
    if uri not in session.uris and len(session.uris) >= MAX_SUBSCRIPTIONS:
        raise RpcError(INVALID_PARAMS, "uri: too many subscriptions")
    owner = await context.owner(uri)
    async with permitted(context, owner, SUBSCRIBE, uri):
        described = await context.described(owner)
        if not described.modern:
            resources = as_object(described.capabilities.get("resources"))
            if resources.get("subscribe") is not True:
                said = f"The server {owner.name!r} takes no subscriptions"
                raise RpcError(METHOD_NOT_FOUND, said, SUBSCRIBE)
            await context.request(owner, SUBSCRIBE, {"uri": uri})
        await sessions.subscribe(session, uri, owner.name)


async def unsubscribe(
    context: ClientContext, sessions: Sessions, session: Session, params: dict[str, Any]
) -> None:
    """Unsubscribe, whatever its server says: what is not kept is told to no session that begins
    there."""
    uri = str(params.get("uri"))
    owner = session.uris.get(uri)
    await sessions.unsubscribe(session, uri)
    for upstream in context.endpoint.upstreams:
        if upstream.name != owner:
            continue
        try:
            if not (await context.described(upstream)).modern:
                await context.request(upstream, UNSUBSCRIBE, {"uri": uri})
        except RpcError as error:
            log.info("mcp: %s: the end of a subscription is not told: %s", owner, error)


async def owned_by(context: ClientContext, uris: Iterable[str]) -> Owned:
    """Return the owners of URIs, without what is nobody's, what the rules refuse, and what is not
    found out in time: who listens is told which of them it will hear of."""
    found: Owned = {}
    try:
        async with asyncio.timeout(SETUP_TIMEOUT_S):
            for uri in uris:
                with suppress(RpcError):
                    owner = await context.owner(uri)
                    async with permitted(context, owner, LISTEN, uri):
                        found[owner.name] = (*found.get(owner.name, ()), uri)
    except TimeoutError:
        log.info("mcp: whose some resources are was not found out in time")
    return found


@asynccontextmanager
async def permitted(
    context: ClientContext, owner: Upstream, method: str, uri: str
) -> AsyncIterator[None]:
    """Check a subscription by the rules and the caller's limits, and put it on record.

    Raises: RpcError.
    """
    request = GuardedRequest(upstream=owner, alias=uri, method=method, params={"uri": uri})
    permit = await context.guard.permit(context.caller, request)
    outcome: Outcome = "failed"
    try:
        yield
        outcome = "done"
    finally:
        permit.ended(outcome)
