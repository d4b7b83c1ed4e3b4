"""Serves a `subscriptions/listen` of 2026-07-28, before servers of either era.

What a client is told that it will hear of is what servers have acknowledged by then, and what is
decided here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from foundation.tasks import end_tasks
from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.eras import LIST_CHANGES, RESOURCE_UPDATED, SUBSCRIPTION_META
from mcp_bridge.protocol.rpc import Message, RpcError
from mcp_bridge.protocol.translation import to_modern_notification
from mcp_bridge.routing.change_streams import (
    ACKNOWLEDGED,
    checked_filter,
    follow,
    granted_by,
    legacy_changes,
    modern_changes,
    with_uris,
)
from mcp_bridge.routing.endpoint import ClientContext
from mcp_bridge.server.list_watch import Watch, Watches
from mcp_bridge.server.subscriptions import Owned, owned_by
from mcp_bridge.upstream.upstream import SETUP_TIMEOUT_S, Upstream, as_object
from mcp_bridge.worker_relay import Emit

log = logging.getLogger(__name__)

MAX_PENDING = 1024  # changes that a client is behind
ACKNOWLEDGE_S = 5.0
"""How long the servers have to say what they will tell of, before the client is told."""
FLAGS = tuple(LIST_CHANGES.values())


async def listen(
    context: ClientContext,
    subscription: rpc.RequestId,
    params: dict[str, Any],
    emit: Emit,
    drains: asyncio.Event,
    watches: Watches,
) -> None:
    """Listen until the client leaves, or this worker does. Raises: RpcError."""
    wanted = checked_filter(as_object(params.get("notifications")))
    listener = Listener(context, subscription, wanted)
    async with watches.of(context) as watch:
        beginning = asyncio.create_task(watch.begin())
        try:  # at once: a server that does not answer is waited for in both
            answering, owned = await listener.find()
            await beginning
        finally:
            await end_tasks(beginning)
        await listener.run(answering, owned, watch, emit, drains)


class Listener:
    """The listener of one subscription. `wanted`: its filter, checked."""

    def __init__(
        self, context: ClientContext, subscription: rpc.RequestId, wanted: dict[str, Any]
    ) -> None:
        self._context, self._subscription, self._wanted = context, subscription, wanted
        self._granted: dict[str, Any] = {}
        if context.guard.catalog is not None:
            self._granted |= {flag: True for flag in FLAGS if wanted.get(flag) is True}
        self._pending: asyncio.Queue[Message] = asyncio.Queue(MAX_PENDING)
        self._acknowledged = asyncio.Semaphore(0)

    async def find(self) -> tuple[int, Owned]:
        """Return how many servers answer, and which of them have the resources."""
        try:
            answering = len(await self._context.describe())
        except RpcError as error:
            log.info("mcp: no server says what it is: %s", error)
            answering = 0
        uris = self._wanted.get("resourceSubscriptions") or ()
        return answering, await owned_by(self._context, uris)

    async def run(
        self, answering: int, owned: Owned, watch: Watch, emit: Emit, drains: asyncio.Event
    ) -> None:
        async with asyncio.TaskGroup() as group:
            following = []
            for upstream in self._context.endpoint.upstreams:
                wanted = with_uris(self._wanted, owned.get(upstream.name, ()))
                open_ = partial(changes_at, self._context, upstream, wanted)
                work = follow(upstream, open_, partial(self._take_of, upstream))
                following.append(group.create_task(work))
            try:
                await self._wait_for(answering)
                meta = {SUBSCRIPTION_META: self._subscription}
                about = {"notifications": dict(self._granted), "_meta": meta}
                await emit(rpc.notification(ACKNOWLEDGED, about))
                following.append(group.create_task(pass_on(self._pending, emit)))
                following.append(group.create_task(watch.run(self._tell)))
                await drains.wait()
            finally:
                await end_tasks(*following, again_s=SETUP_TIMEOUT_S)

    async def _wait_for(self, acknowledgments: int) -> None:
        try:
            async with asyncio.timeout(ACKNOWLEDGE_S):
                for _ in range(acknowledgments):
                    await self._acknowledged.acquire()
        except TimeoutError:
            log.info("mcp: not all servers acknowledged a subscription in time")

    async def _take_of(self, upstream: Upstream, message: Message) -> None:
        if message["method"] != ACKNOWLEDGED:
            if await self._may_hear(upstream, message):
                await self._put(message)
            return
        granted = self._granted
        for name, value in granted_by(message, self._wanted).items():
            known = granted.setdefault(name, value)
            if isinstance(value, list) and known is not value:
                granted[name] = sorted({*known, *value})
        self._acknowledged.release()

    async def _may_hear(self, upstream: Upstream, message: Message) -> bool:
        """True if the client may be told; the rules may have changed since."""
        if message["method"] != RESOURCE_UPDATED:
            return True
        uri = str(rpc.params_of(message).get("uri"))
        return await self._context.guard.shows_resource(self._context.caller, upstream, uri)

    async def _put(self, message: Message) -> None:
        told = to_modern_notification(message, self._subscription)
        if told is not None:
            await self._pending.put(told)

    async def _tell(self, method: str) -> None:
        """Tell the client of a change that no server says."""
        if self._wanted.get(LIST_CHANGES[method]) is True:
            await self._put(rpc.notification(method))


async def pass_on(pending: asyncio.Queue[Message], emit: Emit) -> None:
    while True:
        await emit(await pending.get())


async def changes_at(
    context: ClientContext, upstream: Upstream, wanted: dict[str, Any]
) -> AsyncGenerator[Message | None]:
    """Yield changes at a server by the era that it is of now. Raises: RpcError."""
    described = await context.described(upstream)
    open_ = modern_changes if described.modern else legacy_changes
    async with aclosing(open_(upstream, context.envelope, wanted)) as found:
        async for message in found:
            yield message
