"""Runs the stream of a session of the older era, outside of requests: what its servers say and ask.

A session has one at a time, in whichever worker its client opened it; who opens another leaves the
one before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from foundation.tasks import TaskSet, end_tasks
from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.allowed_fields import from_server_notification
from mcp_bridge.protocol.eras import LIST_CHANGES, LOG, RESOURCE_UPDATED, passes_level
from mcp_bridge.protocol.rpc import Message
from mcp_bridge.routing.change_streams import (
    ACKNOWLEDGED,
    follow,
    modern_changes,
    session_changes,
    with_uris,
)
from mcp_bridge.routing.endpoint import ClientContext, Endpoint
from mcp_bridge.routing.guard import Guard
from mcp_bridge.routing.sessions import Session, Sessions
from mcp_bridge.server.elicitation import Questions
from mcp_bridge.server.list_watch import Watch, Watches
from mcp_bridge.server.outside_questions import OutsideQuestions
from mcp_bridge.server.streams import Stream
from mcp_bridge.upstream.upstream import Upstream
from mcp_bridge.worker_relay import Payload, Relay

log = logging.getLogger(__name__)

ENDED, CHANGED = "ended", "changed"

ContextOf = Callable[[Endpoint, Session], ClientContext]


class FollowedServer:
    """A server that one stream follows. `uris`: those of it that the session subscribes to."""

    task: asyncio.Task[None]

    def __init__(self, uris: tuple[str, ...]) -> None:
        self.uris = uris
        self.is_legacy = False
        """It was told of each of them, and is asked for no other stream."""


class SessionStreams:
    """The session streams of one worker."""

    def __init__(
        self,
        sessions: Sessions,
        relay: Relay,
        guard: Guard,
        questions: Questions,
        watches: Watches,
        context_of: ContextOf,
    ) -> None:
        self._sessions, self._relay, self._guard = sessions, relay, guard
        self._questions, self._watches, self._context_of = questions, watches, context_of
        self._listening: dict[str, tuple[Stream, asyncio.Event]] = {}
        self.tasks = TaskSet()
        relay.handlers[ENDED] = self._take_ended
        relay.handlers[CHANGED] = self._take_changed

    def begin_drain(self) -> None:
        for session_id in list(self._listening):
            self._leave(session_id)

    async def close(self) -> None:
        await self.tasks.close()

    async def ended(self, session: Session) -> None:
        """Tell every worker that a session has ended."""
        await self._relay.tell_all(ENDED, session=session.id)

    async def changed(self, session: Session) -> None:
        """Tell the worker that has the session's stream that its subscriptions changed."""
        await self._relay.tell_all(CHANGED, session=session.id)

    async def listen(self, endpoint: Endpoint, session: Session) -> Stream:
        """Open the stream of what the servers say outside of requests, from now on, and no longer
        to who listened before."""
        await self._sessions.set_listens(session, True)
        await self._relay.tell_all(ENDED, session=session.id, but=self._relay.worker)
        await self._sessions.streams.drop(session.id)
        self._leave(session.id)
        stream = Stream(self._sessions, session, self._relay.worker, None, self.tasks)
        changed = asyncio.Event()
        self._listening[session.id] = (stream, changed)
        self.tasks.spawn(self._follow(endpoint, session, stream, changed))
        await stream.prime()
        return stream

    def stop(self, session: Session, stream: Stream) -> None:
        """Close a session's stream whose reader or writer has gone."""
        if self._listening.get(session.id, (None,))[0] is stream:
            self._leave(session.id)
            self.tasks.spawn(self._sessions.set_listens(session, False))

    def _leave(self, session_id: str) -> None:
        stream, changed = self._listening.pop(session_id, (None, None))
        if stream is not None and changed is not None:
            stream.close()
            changed.set()

    async def _take_ended(self, payload: Payload) -> None:
        if payload.get("but") != self._relay.worker:
            self._leave(payload["session"])
            await self._sessions.streams.drop(payload["session"])

    async def _take_changed(self, payload: Payload) -> None:
        if payload["session"] in self._listening:
            self._listening[payload["session"]][1].set()

    async def _follow(
        self, endpoint: Endpoint, session: Session, stream: Stream, changed: asyncio.Event
    ) -> None:
        context = self._context_of(endpoint, session)
        try:
            async with self._watches.of(context) as watch:
                await watch.begin()
                await self._follow_all(context, session, stream, changed, watch)
        except Exception:
            # Its client opens another, where one that hears nothing would be kept.
            log.warning("mcp: the stream of a session is ended", exc_info=True)
        self.stop(session, stream)

    async def _follow_all(
        self,
        context: ClientContext,
        session: Session,
        stream: Stream,
        changed: asyncio.Event,
        watch: Watch,
    ) -> None:
        """Follow each server, also one that gives no answer yet.

        Subscriptions of the newer era are made anew whenever what they are of changes.
        """

        async def tell(method: str) -> None:
            await stream.put(rpc.notification(method))

        watching = asyncio.create_task(watch.run(tell))
        followed: dict[str, FollowedServer] = {}
        try:
            while self._listening.get(session.id, (None,))[0] is stream:
                changed.clear()
                now = await self._sessions.reload(session) or session
                for upstream in context.endpoint.upstreams:
                    uris = now.uris_of(upstream.name)
                    before = followed.get(upstream.name)
                    if before is not None and (before.is_legacy or before.uris == uris):
                        before.uris = uris
                        continue
                    if before is not None:
                        await end_tasks(before.task)
                    found = followed[upstream.name] = FollowedServer(uris)
                    work = self._follow_one(context, session, upstream, found, stream)
                    found.task = asyncio.create_task(work)
                await changed.wait()
        finally:
            await end_tasks(watching, *(each.task for each in followed.values()))

    async def _follow_one(
        self,
        context: ClientContext,
        session: Session,
        upstream: Upstream,
        found: FollowedServer,
        stream: Stream,
    ) -> None:
        place = context, session, upstream, stream
        asked = OutsideQuestions(*place, self._guard, self._questions, self.tasks)

        async def take(message: Message) -> None:
            if rpc.is_response(message):
                return
            if rpc.is_request(message):
                await asked.take(message)
            elif await self._is_for(context, session, upstream, message):
                told = from_server_notification(message, legacy=True)
                if told is not None:
                    await stream.put(told)

        async def open_() -> AsyncGenerator[Message | None]:
            described = await context.described(upstream)
            found.is_legacy = not described.modern
            wanted: dict[str, Any] = dict.fromkeys(LIST_CHANGES.values(), True)
            said: AsyncGenerator[Message | None] = (
                modern_changes(upstream, context.envelope, with_uris(wanted, found.uris))
                if described.modern
                else session_changes(upstream, context.sessions)
            )
            async with aclosing(said) as messages:
                async for message in messages:
                    yield message

        await follow(upstream, open_, take)

    async def _is_for(
        self, context: ClientContext, session: Session, upstream: Upstream, message: Message
    ) -> bool:
        """True if the client is told a notification: what it said may have changed since, at any
        worker, and so may the rules."""
        method = message["method"]
        if method in (ACKNOWLEDGED, "notifications/cancelled"):
            return False
        if method == LOG:
            now = await self._sessions.reload(session)
            return now is None or passes_level(message, now.level)
        if method == RESOURCE_UPDATED:
            uri = str(rpc.params_of(message).get("uri"))
            is_its_own = await self._sessions.server_of(session, uri) in (None, upstream.name)
            return is_its_own and await self._guard.shows_resource(context.caller, upstream, uri)
        return True
