"""Follows what changes at servers, as it is told: by a stream of the older era, a subscription of
the newer.

A stream that breaks by whatever is opened again, later each time; who listens is told nothing of
it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.allowed_fields import from_server_error
from mcp_bridge.protocol.envelope import Envelope, modern_headers
from mcp_bridge.protocol.eras import LIST_CHANGES
from mcp_bridge.protocol.rpc import INVALID_PARAMS, Message, RpcError
from mcp_bridge.protocol.translation import is_wanted, supported_filter, to_modern_params
from mcp_bridge.provenance import clean_error, clean_message
from mcp_bridge.routing.exchanges import SessionSource
from mcp_bridge.routing.sessions import MAX_SUBSCRIPTIONS, MAX_URI_LEN
from mcp_bridge.upstream.upstream import (
    SessionEnded,
    Unreachable,
    Upstream,
    UpstreamSession,
    as_object,
    legacy_headers,
)

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 30.0
TAKEN_PAUSES_S = (0.05, 0.1, 0.2, 0.4)
"""Pauses while a server says that the stream is taken: by a call that has just left it."""
ACKNOWLEDGED = "notifications/subscriptions/acknowledged"


class NoChangeStream(Exception):
    """The server has no stream but those of requests."""


Take = Callable[[Message], Awaitable[None]]


class FixedSession(SessionSource):
    """A session of its own, which is not replaced."""

    def __init__(self, session: UpstreamSession) -> None:
        self._session = session

    async def get(self, upstream: Upstream) -> UpstreamSession:
        return self._session

    async def replace(self, upstream: Upstream, ended: UpstreamSession) -> UpstreamSession:
        raise Unreachable(upstream.name, "session")


async def modern_changes(
    upstream: Upstream, envelope: Envelope, wanted: dict[str, Any]
) -> AsyncGenerator[Message]:
    """Yield what a server acknowledges first, then its changes. Raises: RpcError."""
    method = "subscriptions/listen"
    params = to_modern_params({"notifications": wanted}, envelope)
    message = rpc.request(upstream.next_id(), method, params)
    headers = modern_headers(method, params)
    async with upstream.ask("POST", message, headers, endless=True) as answer:
        async with aclosing(answer.messages()) as messages:
            async for found in messages:
                if found is None or rpc.is_request(found):
                    continue
                if rpc.is_response(found):
                    if "error" in found:
                        raise clean_error(from_server_error(found["error"], modern=True))
                    return
                if found["method"] == ACKNOWLEDGED or is_wanted(found, wanted):
                    yield found


async def legacy_changes(
    upstream: Upstream, envelope: Envelope, wanted: dict[str, Any]
) -> AsyncGenerator[Message]:
    """Yield changes as the newer era tells them, over a session of their own. Raises: RpcError."""
    session, described = await upstream.initialize(envelope)
    try:
        granted = supported_filter(wanted, described.capabilities)
        if "resourceSubscriptions" in granted:
            asked = granted["resourceSubscriptions"]
            taken = [uri for uri in asked if await subscribed(upstream, session, uri)]
            granted["resourceSubscriptions"] = taken
        acknowledged = False
        async with aclosing(session_changes(upstream, FixedSession(session))) as found:
            async for message in found:
                if not acknowledged:
                    acknowledged = True
                    yield rpc.notification(ACKNOWLEDGED, {"notifications": granted})
                if message is not None and is_wanted(message, granted):
                    yield message
    finally:
        await upstream.end(session)


async def subscribed(upstream: Upstream, session: UpstreamSession, uri: str) -> bool:
    """Subscribe to a resource, and return whether the server took it: one that is refused keeps
    back nothing else. Raises: Unreachable, SessionEnded."""
    try:
        await upstream.request(session, "resources/subscribe", {"uri": uri})
    except Unreachable:
        raise
    except RpcError as error:
        log.info("mcp: %s: a subscription is refused: %d", upstream.name, error.code)
        return False
    return True


def with_uris(wanted: dict[str, Any], uris: tuple[str, ...]) -> dict[str, Any]:
    """Return the filter for the server that has these of its resources."""
    others = {name: value for name, value in wanted.items() if name != "resourceSubscriptions"}
    return {**others, "resourceSubscriptions": [*uris]} if uris else others


async def session_changes(
    upstream: Upstream, sessions: SessionSource
) -> AsyncGenerator[Message | None]:
    """Yield what a server tells a session outside of requests; first None, once it can.

    Raises: TellsNothing, RpcError."""
    session = await sessions.get(upstream)
    for pause_s in TAKEN_PAUSES_S:
        async with upstream.ask("GET", None, legacy_headers(session), endless=True) as answer:
            if answer.status == 404 and session.id is not None:
                await sessions.replace(upstream, session)
                return
            if answer.status != 409:
                yield None
                if answer.status != 200 or not answer.is_stream:
                    raise NoChangeStream
                async with aclosing(answer.messages()) as messages:
                    async for found in messages:
                        if found is not None:
                            yield found
                return
        await asyncio.sleep(pause_s)
    raise Unreachable(upstream.name, "stream_taken")


async def follow(
    upstream: Upstream, open_: Callable[[], AsyncGenerator[Message | None]], take: Take
) -> None:
    """Follow a server's changes for as long as somebody listens, which is until this is
    cancelled."""
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            async with aclosing(open_()) as found:
                async for message in found:
                    if message is not None and message.get("method") != ACKNOWLEDGED:
                        message = clean_message(message)
                    if message is not None:
                        await take(message)
                    pause_s = FIRST_PAUSE_S
        except NoChangeStream:
            return
        except (RpcError, SessionEnded) as error:
            log.info("mcp: %s tells nothing for now: %s", upstream.name, error)
        except Exception:
            log.warning("mcp: %s: what it tells is lost for now", upstream.name, exc_info=True)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LAST_PAUSE_S)


def checked_filter(wanted: dict[str, Any]) -> dict[str, Any]:
    """Check a filter: each of its URIs is looked for at every server that is followed, so they are
    few, and short. Raises: RpcError."""
    uris = wanted.get("resourceSubscriptions")
    if uris is None:
        return wanted
    field = "notifications.resourceSubscriptions"
    if not isinstance(uris, list) or not all(isinstance(uri, str) for uri in uris):
        raise RpcError(INVALID_PARAMS, f"{field}: no list of URIs")
    if any(len(uri) > MAX_URI_LEN for uri in uris):
        raise RpcError(INVALID_PARAMS, f"{field}: a URI of more than {MAX_URI_LEN} characters")
    found = list(dict.fromkeys(uris))
    if len(found) > MAX_SUBSCRIPTIONS:
        raise RpcError(INVALID_PARAMS, f"{field}: more than {MAX_SUBSCRIPTIONS}")
    return {**wanted, "resourceSubscriptions": found}


def granted_by(message: Message, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return what a server acknowledges of what was `wanted`, as far as it can be told to a
    client."""
    said = as_object(rpc.params_of(message).get("notifications"))
    found: dict[str, Any] = {flag: True for flag in LIST_CHANGES.values() if said.get(flag) is True}
    uris = said.get("resourceSubscriptions")
    if isinstance(uris, list):
        asked = frozenset(wanted.get("resourceSubscriptions") or ())
        found["resourceSubscriptions"] = [
            uri for uri in uris if isinstance(uri, str) and uri in asked
        ]
    return found
