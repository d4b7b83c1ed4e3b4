"""Requests of 2025-11-25 and before: sessions, streams, and what a server asks of a client.

Above: `door`. Below: `endpoint`, `exchanges`, `streams`, `relay`. A call runs in a task of its own:
that its client's connection breaks does not end it. What a server of either era wants of the client
is asked on the call's stream; the answer may come in at any worker and is led to the one whose call
it is, by the id of what was asked.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

from mcp_bridge.caller import Caller
from mcp_bridge.changes import ACKNOWLEDGED, follow, modern_changes, session_changes
from mcp_bridge.ending import end
from mcp_bridge.endpoint import Endpoint, Reach
from mcp_bridge.exchanges import (
    CALL_S,
    MAX_ASKED,
    Answers,
    Asked,
    Done,
    Exchange,
    Noted,
    Waiting,
)
from mcp_bridge.guard import Guard
from mcp_bridge.places import Places
from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.eras import (
    FORWARDED,
    LEVELS,
    LISTS,
    LOG,
    agree,
    check_request,
    is_loud_enough,
)
from mcp_bridge.protocol.inbound import check_said
from mcp_bridge.protocol.rpc import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    REQUEST_CANCELLED,
    Message,
    RpcError,
)
from mcp_bridge.protocol.translation import (
    answer_for_server,
    check_can,
    to_legacy_error,
    to_legacy_result,
    to_unsubscribed,
)
from mcp_bridge.relay import Payload, Relay
from mcp_bridge.sampling import WINDOW_S, SampleCount, is_sampling, sampled
from mcp_bridge.sessions import (
    MAX_URI_LEN,
    About,
    OfSession,
    Session,
    Sessions,
    TooManySessions,
)
from mcp_bridge.sign_in import to_url_required
from mcp_bridge.streams import Stream
from mcp_bridge.upstream import MAX_SESSION_ID_LENGTH, SessionEnded, Upstream, as_object

log = logging.getLogger(__name__)

MAX_ROUNDS = 16
"""In which one call asks its client."""
ANSWER_S = 600.0
MAX_CALLS = 1024
"""Of one worker."""
MAX_CALLS_OF_ORG = 256
MAX_CALLS_OF_ONE = 128
"""Of one tenant, and of one principal, in one worker."""
TOO_MANY = -32000
ANSWER, CANCEL, ENDED, CHANGED = "answer", "cancel", "ended", "changed"

Pending = tuple[str, asyncio.Future[Message]]


class LegacyFace:
    def __init__(
        self, sessions: Sessions, relay: Relay, info: dict[str, Any], guard: Guard
    ) -> None:
        self._sessions, self._relay = sessions, relay
        self._info, self._guard = info, guard
        self._calls: dict[tuple[str, rpc.RequestId], asyncio.Task[None]] = {}
        self._places = Places(MAX_CALLS, MAX_CALLS_OF_ORG, MAX_CALLS_OF_ONE)
        self._pending: dict[str, Pending] = {}
        self._numbers = itertools.count(1)
        self._listening: dict[str, tuple[Stream, asyncio.Event]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        relay.handlers[ANSWER] = self._take_answer
        relay.handlers[CANCEL] = self._take_cancel
        relay.handlers[ENDED] = self._take_ended
        relay.handlers[CHANGED] = self._take_changed

    def begin_drain(self) -> None:
        for session_id in list(self._listening):
            self._leave(session_id)

    async def close(self) -> None:
        await end(*self._calls.values(), *self._tasks)

    # Sessions.

    async def initialize(
        self, caller: Caller, endpoint: Endpoint, params: dict[str, Any]
    ) -> tuple[Session, dict[str, Any]]:
        """Raises: RpcError."""
        version = agree(params.get("protocolVersion"))
        check_request("initialize", version, params)
        said = params.get("capabilities"), params.get("clientInfo")
        check_said(*said, named=("capabilities", "clientInfo"))
        about = About(
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
        reach = self._reach(endpoint, session)
        capabilities, instructions = await reach.capabilities(legacy=True)
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
        await self._relay.tell_all(ENDED, session=session.id)
        for upstream in endpoint.upstreams:
            own = session.upstreams.get(upstream.name)
            if own is not None:
                self._spawn(upstream.end(own))

    def _reach(self, endpoint: Endpoint, session: Session) -> Reach:
        sessions = OfSession(self._sessions, session)
        return Reach(
            caller=Caller.of(session.about.principal),
            endpoint=endpoint,
            envelope=session.envelope,
            sessions=sessions,
            guard=self._guard,
        )

    # Requests.

    def begin(self, endpoint: Endpoint, session: Session, message: Message) -> Stream:
        """The stream on which it is answered. Raises: RpcError."""
        key = (session.id, message["id"])
        owners = session.org_id, session.about.principal
        if key in self._calls:
            raise RpcError(INVALID_REQUEST, "id: a request with it is under way")
        if not self._places.take(*owners):
            raise RpcError(TOO_MANY, "Too many requests are under way", status=429)
        stream = Stream(self._sessions, session, self._relay.worker, message["id"])
        work = self._run(endpoint, session, message, stream)
        task = asyncio.get_running_loop().create_task(work)
        self._calls[key] = task

        def forget(done: asyncio.Task[None]) -> None:
            del self._calls[key]
            self._places.give_back(*owners)
            if done.cancelled() and not stream.ended:
                # it had not begun, and said nothing to who waits
                cancelled = RpcError(REQUEST_CANCELLED, "Cancelled")
                self._spawn(stream.finish(rpc.failure(message["id"], cancelled)))
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
            said = rpc.result(message["id"], to_legacy_result(result))
        except RpcError as error:
            about, error = session.about, to_legacy_error(method, params, error)
            error = to_url_required(error, about.version, about.capabilities)
            said = rpc.failure(message["id"], error)
        except TimeoutError:
            said = rpc.failure(message["id"], RpcError(INTERNAL_ERROR, "It took too long"))
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
        method, params = message["method"], rpc.params_of(message)
        reach = self._reach(endpoint, session)
        if method == "ping":
            return {}
        if method == "logging/setLevel":
            return await self._set_level(reach, session, params)
        if method in ("resources/subscribe", "resources/unsubscribe"):
            return await self._subscribe(reach, session, method, params)
        if method in LISTS:
            return await reach.list(method, params)
        if method not in FORWARDED:
            raise RpcError(METHOD_NOT_FOUND, "Method not found", method)
        found, params = await reach.meant(method, params)
        if found is not None:
            return found
        upstream, own = await reach.target(method, params)
        exchange = await reach.open(upstream, method, own, alias=str(params.get("name")))
        return await self._drive(session, exchange, stream)

    async def _drive(self, session: Session, exchange: Exchange, stream: Stream) -> dict[str, Any]:
        rounds = 0
        try:
            async with aclosing(exchange.events()) as events:
                async for event in events:
                    if isinstance(event, Done):
                        return event.result
                    if isinstance(event, Noted):
                        if is_loud_enough(event.message, session.level):
                            await stream.put(to_unsubscribed(event.message))
                    elif isinstance(event, Waiting):
                        await stream.prime()
                    elif isinstance(event, Asked):
                        rounds += 1
                        if rounds > MAX_ROUNDS:
                            raise RpcError(INTERNAL_ERROR, "The server asked too often")
                        await exchange.answer(await self._ask(session, event.requests, stream))
        except (asyncio.CancelledError, TimeoutError):
            self._spawn(exchange.cancel("the client cancelled it"))
            raise
        raise AssertionError("an exchange ends with a result or raises")

    async def _ask(self, session: Session, requests: dict[str, Message], stream: Stream) -> Answers:
        """All of them at once."""
        answered = await asyncio.gather(
            *(self._ask_one(session, request, stream) for request in requests.values())
        )
        return dict(zip(requests, answered, strict=True))

    async def _ask_one(self, session: Session, request: Message, stream: Stream) -> Message:
        """What the client answers, or why it cannot."""
        id_ = f"{self._relay.worker}.{next(self._numbers)}"
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._pending[id_] = (session.id, future)
        try:
            check_can(str(request.get("method")), session.about.capabilities)
            if not stream.can_be_heard:
                raise RpcError(INTERNAL_ERROR, "The client is not there")
            params = as_object(request.get("params"))
            await stream.put(rpc.request(id_, str(request["method"]), params))
            async with asyncio.timeout(ANSWER_S):
                return await future
        except RpcError as error:
            return {"error": error.to_error()}
        except TimeoutError:
            return {"error": RpcError(INTERNAL_ERROR, "The client did not answer").to_error()}
        finally:
            del self._pending[id_]

    async def _set_level(
        self, reach: Reach, session: Session, params: dict[str, Any]
    ) -> dict[str, Any]:
        """Kept, for servers that want it with each request; told to those that keep it."""
        level = params.get("level")
        if level not in LEVELS:
            raise RpcError(INVALID_PARAMS, "level: no log level")
        await self._sessions.set_level(session, level)
        for upstream, described in await reach.describe():
            if not described.modern and "logging" in described.capabilities:
                await reach.request(upstream, "logging/setLevel", {"level": level})
        return {}

    async def _subscribe(
        self, reach: Reach, session: Session, method: str, params: dict[str, Any]
    ) -> dict[str, Any]:
        """Kept, for the stream of the session; told to servers that keep it."""
        uri = str(params.get("uri"))
        if len(uri) > MAX_URI_LEN:
            raise RpcError(INVALID_PARAMS, f"uri: more than {MAX_URI_LEN} characters")
        if method == "resources/unsubscribe":
            await self._sessions.unsubscribe(session, uri)
        elif not await self._sessions.subscribe(session, uri):
            raise RpcError(INVALID_PARAMS, "uri: too many subscriptions")
        for upstream, described in await reach.describe():
            resources = as_object(described.capabilities.get("resources"))
            if not described.modern and resources.get("subscribe") is True:
                await reach.request(upstream, method, {"uri": uri})
        await self._relay.tell_all(CHANGED, session=session.id)
        return {}

    # What the client says without asking.

    async def take(self, session: Session, message: Message) -> None:
        """A notification, or an answer to what was asked. Raises: RpcError, for an answer to
        nothing."""
        if rpc.is_response(message):
            await self._led(session, message)
        elif message["method"] == "notifications/cancelled":
            request_id = rpc.params_of(message).get("requestId")
            if not self._cancel(session.id, request_id):
                await self._relay.tell_all(CANCEL, session=session.id, request=request_id)

    async def _led(self, session: Session, message: Message) -> None:
        id_ = message.get("id")
        worker = str(id_).partition(".")[0]
        if worker == self._relay.worker:
            found = self._give(session.id, str(id_), message)
        else:
            found = worker.isalnum() and await self._relay.tell(
                worker, ANSWER, session=session.id, id=str(id_), message=message
            )
        if not found:
            raise RpcError(INVALID_REQUEST, "id: nothing was asked with it")

    def _give(self, session_id: str, id_: str, message: Message) -> bool:
        owner, future = self._pending.get(id_, (None, None))
        if future is None or owner != session_id:
            return False
        if not future.done():
            future.set_result(message)
        return True

    async def _take_answer(self, payload: Payload) -> None:
        self._give(payload["session"], payload["id"], payload["message"])

    async def _take_cancel(self, payload: Payload) -> None:
        self._cancel(payload["session"], payload["request"])

    def _cancel(self, session_id: str, request_id: Any) -> bool:
        task = self._calls.get((session_id, request_id)) if rpc.is_id(request_id) else None
        return task is not None and task.cancel()

    # The stream of a session.

    async def listen(self, endpoint: Endpoint, session: Session) -> Stream:
        """What the servers say outside of requests, from now on, and no longer to who listened
        before."""
        await self._sessions.set_listens(session, True)
        await self._relay.tell_all(ENDED, session=session.id, but=self._relay.worker)
        await self._sessions.streams.drop(session.id)
        self._leave(session.id)
        stream = Stream(self._sessions, session, self._relay.worker, None)
        changed = asyncio.Event()
        self._listening[session.id] = (stream, changed)
        self._spawn(self._follow(endpoint, session, stream, changed))
        await stream.prime()
        return stream

    def stop(self, session: Session, stream: Stream) -> None:
        """Its reader is gone."""
        if self._listening.get(session.id, (None,))[0] is stream:
            self._leave(session.id)
            self._spawn(self._sessions.set_listens(session, False))

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
        """Subscriptions of the newer era are made anew whenever what they are of changes."""
        reach = self._reach(endpoint, session)
        try:
            followed = await reach.describe()
        except RpcError as error:
            log.info("mcp: no server says what it is: %s", error)
            followed = []
        lasting = [
            asyncio.create_task(self._follow_one(reach, session, upstream, False, stream))
            for upstream, described in followed
            if not described.modern
        ]
        try:
            while self._listening.get(session.id, (None,))[0] is stream:
                changed.clear()
                now = await self._sessions.reload(session) or session
                renewed = [
                    asyncio.create_task(self._follow_one(reach, now, upstream, True, stream))
                    for upstream, described in followed
                    if described.modern
                ]
                try:
                    await changed.wait()
                finally:
                    await end(*renewed)
        finally:
            await end(*lasting)

    async def _follow_one(
        self, reach: Reach, session: Session, upstream: Upstream, modern: bool, stream: Stream
    ) -> None:
        asked: set[asyncio.Task[None]] = set()
        samples = SampleCount(upstream, window_s=WINDOW_S)

        async def take(message: Message) -> None:
            if rpc.is_response(message):
                return
            if rpc.is_request(message):
                while len(asked) >= MAX_ASKED:
                    await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                work = self._pass_on(reach, session, upstream, message, stream, samples)
                task = self._spawn(work)
                asked.add(task)
                task.add_done_callback(asked.discard)
            elif message["method"] not in (ACKNOWLEDGED, "notifications/cancelled"):
                # Its level may have changed since, told to any worker.
                now = await self._sessions.reload(session) if message["method"] == LOG else None
                if now is None or is_loud_enough(message, now.level):
                    await stream.put(to_unsubscribed(message))

        def open_() -> AsyncGenerator[Message | None]:
            if not modern:
                return session_changes(upstream, reach.sessions)
            wanted: dict[str, Any] = dict.fromkeys(
                ("toolsListChanged", "promptsListChanged", "resourcesListChanged"), True
            )
            if session.uris:
                wanted["resourceSubscriptions"] = sorted(session.uris)
            return modern_changes(upstream, reach.envelope, wanted)

        await follow(upstream, open_, take)

    async def _pass_on(
        self,
        reach: Reach,
        session: Session,
        upstream: Upstream,
        message: Message,
        stream: Stream,
        samples: SampleCount,
    ) -> None:
        """What a server asks of the client outside of requests."""
        if message["method"] == "ping":
            answered: Message = {"result": {}}
        elif is_sampling(message) and upstream.config.sampling != "caller":
            try:
                answered = {"result": await sampled(upstream, reach.caller, message, samples)}
            except RpcError as error:
                answered = {"error": error.to_error()}
        else:
            await self._guard.heard(reach.caller, upstream)
            answered = await self._ask_one(session, message, stream)
        kept = answer_for_server(answered)
        own = await reach.sessions.get(upstream)
        with suppress(RpcError, SessionEnded):
            await upstream.notify(own, {"jsonrpc": "2.0", "id": message["id"], **kept})

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
