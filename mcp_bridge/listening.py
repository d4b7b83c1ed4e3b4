"""A `subscriptions/listen` of 2026-07-28, before servers of either era.

Above: `modern_face`. Below: `changes`, `endpoint`. What a client is told that it will hear of is
what servers have acknowledged by then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

from mcp_bridge import ending
from mcp_bridge.changes import (
    ACKNOWLEDGED,
    checked_filter,
    follow,
    granted_by,
    legacy_changes,
    modern_changes,
    with_uris,
)
from mcp_bridge.endpoint import Reach
from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.eras import SUBSCRIPTION_META
from mcp_bridge.protocol.inbound import Envelope
from mcp_bridge.protocol.rpc import Message
from mcp_bridge.protocol.translation import to_subscribed
from mcp_bridge.relay import Emit
from mcp_bridge.upstream import SETUP_TIMEOUT_S, Upstream, as_object

log = logging.getLogger(__name__)

MAX_PENDING = 1024
"""Changes that a client is behind."""
ACKNOWLEDGE_S = 5.0
"""How long the servers have to say what they will tell of, before the client is told."""


async def listen(
    reach: Reach,
    subscription: rpc.RequestId,
    params: dict[str, Any],
    emit: Emit,
    drains: asyncio.Event,
) -> None:
    """Until the client leaves, or this worker does. Raises: RpcError."""
    wanted = checked_filter(as_object(params.get("notifications")))
    granted: dict[str, Any] = {}
    pending: asyncio.Queue[Message] = asyncio.Queue(MAX_PENDING)
    followed = await reach.describe()
    owned = await reach.by_owner(wanted.get("resourceSubscriptions") or ())
    acknowledged = asyncio.Semaphore(0)

    async def take(message: Message) -> None:
        if message["method"] != ACKNOWLEDGED:
            await pending.put(to_subscribed(message, subscription))
            return
        for name, value in granted_by(message, wanted).items():
            known = granted.setdefault(name, value)
            if isinstance(value, list) and known is not value:
                granted[name] = sorted({*known, *value})
        acknowledged.release()

    async with asyncio.TaskGroup() as group:
        following = [
            group.create_task(
                follow(
                    upstream,
                    opener(
                        modern_changes if described.modern else legacy_changes,
                        upstream,
                        reach.envelope,
                        with_uris(wanted, owned.get(upstream.name, ())),
                    ),
                    take,
                )
            )
            for upstream, described in followed
        ]
        try:
            try:
                async with asyncio.timeout(ACKNOWLEDGE_S):
                    for _ in followed:
                        await acknowledged.acquire()
            except TimeoutError:
                log.info("mcp: not all servers acknowledged a subscription in time")
            about = {"notifications": dict(granted), "_meta": {SUBSCRIPTION_META: subscription}}
            await emit(rpc.notification(ACKNOWLEDGED, about))
            following.append(group.create_task(pass_on(pending, emit)))
            await drains.wait()
        finally:
            await ending.end(*following, again_s=SETUP_TIMEOUT_S)


async def pass_on(pending: asyncio.Queue[Message], emit: Emit) -> None:
    while True:
        await emit(await pending.get())


Open = Callable[[Upstream, Envelope, dict[str, Any]], AsyncGenerator[Message]]


def opener(
    open_: Open, upstream: Upstream, envelope: Envelope, wanted: dict[str, Any]
) -> Callable[[], AsyncGenerator[Message | None]]:
    return lambda: open_(upstream, envelope, wanted)
