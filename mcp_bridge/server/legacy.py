"""Requests of 2025-11-25 and before: sessions, and calls on streams of their own.

A call runs in a task of its own: that its client's connection breaks does not end it. What a server
of either era wants of the client is asked on the call's stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from typing import Any

from foundation.tasks import TaskSet, end_tasks
from mcp_bridge.caller import Caller
from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.allowed_fields import from_client_params, from_server_notification
from mcp_bridge.protocol.continuation import CALL_S, QuestionCount, took_too_long
from mcp_bridge.protocol.envelope import check_client_size
from mcp_bridge.protocol.eras import (
    FORWARDED,
    LEVELS,
    LISTS,
    check_request,
    negotiate_version,
    passes_level,
)
from mcp_bridge.protocol.rpc import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    REQUEST_CANCELLED,
    TOO_MANY,
    Message,
    RpcError,
)
from mcp_bridge.protocol.translation import to_legacy_error, to_legacy_result
from mcp_bridge.routing.endpoint import ClientContext, Endpoint
from mcp_bridge.routing.exchanges import (
    Answers,
    Exchange,
    NotificationEvent,
    QuestionEvent,
    ResultEvent,
    WaitEvent,
)
from mcp_bridge.routing.guard import Guard
from mcp_bridge.routing.sessions import (
    ClientSessionSource,
    Session,
    SessionFacts,
    Sessions,
    TooManySessions,
)
from mcp_bridge.server.elicitation import Questions
from mcp_bridge.server.list_watch import Watches
from mcp_bridge.server.session_streams import SessionStreams
from mcp_bridge.server.sign_in import to_url_required
from mcp_bridge.server.slots import Slots
from mcp_bridge.server.streams import Stream
from mcp_bridge.server.subscriptions import SUBSCRIBE, UNSUBSCRIBE, subscribe, unsubscribe
from mcp_bridge.upstream.upstream import MAX_SESSION_ID_LENGTH, SETUP_TIMEOUT_S, Upstream, as_object
from mcp_bridge.worker_relay import Payload, Relay

log = logging.getLogger(__name__)

MAX_CALLS = 1024  # per worker
MAX_CALLS_OF_ORG = 256
MAX_CALLS_OF_ONE = 128
"""Calls of one tenant, and of one principal, in one worker."""
CANCEL = "cancel"


class LegacyProtocol:
    def __init__(
        self,
        sessions: Sessions,
        relay: Relay,
        info: dict[str, Any],
        guard: Guard,
        watches: Watches,
    ) -> None:
        self._sessions, self._relay = sessions, relay
        self._info, self._guard = info, guard
        self._calls: dict[tuple[str, rpc.RequestId], asyncio.Task[None]] = {}
        self._places = Slots(MAX_CALLS, MAX_CALLS_OF_ORG, MAX_CALLS_OF_ONE)
        self._tasks = TaskSet()
        self.questions = Questions(relay)
        self.streams = SessionStreams(
            sessions, relay, guard, self.questions, watches, self._context
        )
        relay.handlers[CANCEL] = self._take_cancel

    def begin_drain(self) -> None:
        self.streams.begin_drain()

    async def close(self) -> None:
        await asyncio.gather(end_tasks(*self._calls.values()), self._tasks.close())
        await self._tasks.close()  # what calls began as they ended
        await self.streams.close()

    # Sessions.

    async def initialize(
        self, caller: Caller, endpoint: Endpoint, params: dict[str, Any]
    ) -> tuple[Session, dict[str, Any]]:
        """Raises: RpcError."""
        version = negotiate_version(params.get("protocolVersion"))
        check_request("initialize", version, params)
        said = params.get("capabilities"), params.get("clientInfo")
        check_client_size(*said, fields=("capabilities", "clientInfo"))
        about = SessionFacts(
            principal=caller.principal,
            endpoint=endpoint.key,
            version=version,
            capabilities=as_object(params.get("capabilities")),
            info=as_object(params.get("clientInfo")),
            keeps_nothing=caller.keeps_nothing,
        )
        try:
            session = await self._sessions.open(caller, about)
        except TooManySessions:
            raise RpcError(TOO_MANY, "Too many sessions are open", status=429) from None
        context = self._context(endpoint, session)
        capabilities, instructions = await context.capabilities(legacy=True)
        result = {
            "protocolVersion": version,
            "capabilities": capabilities,
            "serverInfo": self._info,
        }
        return session, result if instructions is None else {**result, "instructions": instructions}

    async def find(self, caller: Caller, endpoint: Endpoint, id_: str) -> Session:
        """Raises: RpcError, the same whether there is none or it is somebody else's."""
        found = None
        if len(id_) <= MAX_SESSION_ID_LENGTH:
            found = await self._sessions.load(caller, endpoint.key, id_)
        if found is None:
            raise RpcError(INVALID_REQUEST, "No such session", status=404)
        return found

    async def end(self, endpoint: Endpoint, session: Session) -> None:
        await self._sessions.end(session)
        await self.streams.ended(session)
        for upstream in endpoint.upstreams:
            own = session.upstreams.get(upstream.name)
            if own is not None:
                self._tasks.spawn(upstream.end(own))

    def _context(self, endpoint: Endpoint, session: Session) -> ClientContext:
        sessions = ClientSessionSource(self._sessions, session)
        return ClientContext(
            caller=Caller.of(session.about.principal),
            endpoint=endpoint,
            envelope=session.envelope,
            sessions=sessions,
            guard=self._guard,
        )

    # Requests.

    def begin(self, endpoint: Endpoint, session: Session, message: Message) -> Stream:
        """Begin a request, and return the stream of its answer. Raises: RpcError."""
        key = (session.id, message["id"])
        owners = session.org_id, session.about.principal
        if key in self._calls:
            raise RpcError(INVALID_REQUEST, "id: a request with it is under way")
        if not self._places.take(*owners):
            raise RpcError(TOO_MANY, "Too many requests are under way", status=429)
        stream = Stream(self._sessions, session, self._relay.worker, message["id"], self._tasks)
        work = self._run(endpoint, session, message, stream)
        task = asyncio.get_running_loop().create_task(work)
        self._calls[key] = task

        def forget(done: asyncio.Task[None]) -> None:
            del self._calls[key]
            self._places.give_back(*owners)
            if done.cancelled() and not stream.ended:
                # it had not begun, and said nothing to who waits
                cancelled = RpcError(REQUEST_CANCELLED, "Cancelled")
                self._tasks.spawn(stream.finish(rpc.failure(message["id"], cancelled)))
            if not done.cancelled() and (error := done.exception()) is not None:
                log.error("mcp: a call could not be answered", exc_info=error)

        task.add_done_callback(forget)
        return stream

    async def _run(
        self, endpoint: Endpoint, session: Session, message: Message, stream: Stream
    ) -> None:
        method, params = message["method"], rpc.params_of(message)
        try:
            check_request(method, session.about.version, params)
            async with asyncio.timeout(CALL_S):
                result = await self._answer(endpoint, session, message, stream)
            said = rpc.result(message["id"], to_legacy_result(method, result))
        except RpcError as error:
            about, error = session.about, to_legacy_error(method, params, error)
            error = to_url_required(error, about.version, about.capabilities)
            said = rpc.failure(message["id"], error)
        except TimeoutError:
            said = rpc.failure(message["id"], took_too_long())
        except asyncio.CancelledError:
            said = rpc.failure(message["id"], RpcError(REQUEST_CANCELLED, "Cancelled"))
            await stream.finish(said)
            raise
        except Exception:
            log.exception("mcp: a request failed")
            said = rpc.failure(message["id"], RpcError(INTERNAL_ERROR, "Internal error"))
        await stream.finish(said)

    async def _answer(
        self, endpoint: Endpoint, session: Session, message: Message, stream: Stream
    ) -> dict[str, Any]:
        method = message["method"]
        params = from_client_params(method, rpc.params_of(message), modern=False)
        context = self._context(endpoint, session)
        if method == "ping":
            return {}
        if method == "logging/setLevel":
            return await self._set_level(context, session, params)
        if method in (SUBSCRIBE, UNSUBSCRIBE):
            change = subscribe if method == SUBSCRIBE else unsubscribe
            await change(context, self._sessions, session, params)
            await self.streams.changed(session)
            return {}
        if method in LISTS:
            return await context.list(method, params)
        if method not in FORWARDED:
            raise RpcError(METHOD_NOT_FOUND, "Method not found", method)
        found, params = await context.meant(method, params)
        if found is not None:
            return found
        upstream, own = await context.target(method, params)
        exchange = await context.open(upstream, method, own, alias=str(params.get("name")))
        return await self._drive(session, upstream.name, exchange, stream)

    async def _drive(
        self, session: Session, server: str, exchange: Exchange, stream: Stream
    ) -> dict[str, Any]:
        count = QuestionCount(began_at=time.time())
        try:
            async with aclosing(exchange.events()) as events:
                async for event in events:
                    if isinstance(event, ResultEvent):
                        return event.result
                    if isinstance(event, NotificationEvent):
                        if passes_level(event.message, session.level):
                            told = from_server_notification(event.message, legacy=True)
                            if told is not None:
                                stream.say(told)
                    elif isinstance(event, WaitEvent):
                        await stream.prime()
                    elif isinstance(event, QuestionEvent):
                        count = self._counted(count, event, server, exchange)
                        await exchange.answer(await self._ask(session, event.requests, stream))
        except (asyncio.CancelledError, TimeoutError):
            self._tasks.spawn(exchange.cancel("the client cancelled it"))
            raise
        raise AssertionError("an exchange ends with a result or raises")

    def _counted(
        self, count: QuestionCount, asked: QuestionEvent, server: str, exchange: Exchange
    ) -> QuestionCount:
        """Count what a server asks. Raises: RpcError, if it is too much: the call is cancelled."""
        try:
            return count.after(len(asked.requests), server)
        except RpcError:
            self._tasks.spawn(exchange.cancel("the server asked too often"))
            raise

    async def _ask(self, session: Session, requests: dict[str, Message], stream: Stream) -> Answers:
        """Ask the client all of them at once."""
        answered = await asyncio.gather(
            *(self.questions.ask(session, request, stream) for request in requests.values())
        )
        return dict(zip(requests, answered, strict=True))

    async def _set_level(
        self, context: ClientContext, session: Session, params: dict[str, Any]
    ) -> dict[str, Any]:
        """Keep the level, for servers that want it with each request and those that give no answer
        now; tell it to those that keep it. Whatever they say: the client hears nothing below it."""
        level = params.get("level")
        if level not in LEVELS:
            raise RpcError(INVALID_PARAMS, "level: no log level")
        told = (
            self._tell_level(context, upstream, level) for upstream in context.endpoint.upstreams
        )
        await asyncio.gather(*told)
        await self._sessions.set_level(session, level)
        return {}

    async def _tell_level(self, context: ClientContext, upstream: Upstream, level: str) -> None:
        try:
            async with asyncio.timeout(SETUP_TIMEOUT_S):
                described = await context.described(upstream)
                if not described.modern and "logging" in described.capabilities:
                    await context.request(upstream, "logging/setLevel", {"level": level})
        except (RpcError, TimeoutError) as error:
            name = type(error).__name__
            log.info("mcp: %s: the level of its log is not told: %s", upstream.name, name)

    # What the client says without asking.

    async def take(self, session: Session, message: Message) -> None:
        """Handle a notification, or the answer to a question. Raises: RpcError, for an answer to
        nothing."""
        if rpc.is_response(message):
            await self.questions.take(session, message)
        elif message["method"] == "notifications/cancelled":
            request_id = rpc.params_of(message).get("requestId")
            if not self._cancel(session.id, request_id):
                await self._relay.tell_all(CANCEL, session=session.id, request=request_id)

    async def _take_cancel(self, payload: Payload) -> None:
        self._cancel(payload["session"], payload["request"])

    def _cancel(self, session_id: str, request_id: Any) -> bool:
        task = self._calls.get((session_id, request_id)) if rpc.is_id(request_id) else None
        return task is not None and task.cancel()
