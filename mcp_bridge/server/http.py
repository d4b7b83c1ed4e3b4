"""Streamable HTTP, as a server speaks it, for clients of both eras: plain ASGI.

What a client gets is an answer in JSON, until something is to be said before it: then it is a
stream of events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from redis.exceptions import RedisError

from foundation import sse
from foundation.json_values import MAX_VALUES
from foundation.request_context import current_stages, note_client_trace
from foundation.stages import Stage
from foundation.tasks import end_tasks
from mcp_bridge.caller import Caller
from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.envelope import Envelope, read_envelope
from mcp_bridge.protocol.eras import (
    LAST_EVENT_HEADER,
    LEGACY_VERSIONS,
    MODERN,
    SESSION_HEADER,
    VERSION_HEADER,
    is_legacy,
)
from mcp_bridge.protocol.rpc import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    UNSUPPORTED_VERSION,
    Message,
    RpcError,
)
from mcp_bridge.routing.endpoint import Endpoint
from mcp_bridge.routing.guard import MAX_STAGE_NAME, TOOL_ERROR
from mcp_bridge.routing.sessions import Session
from mcp_bridge.server import sign_in
from mcp_bridge.server.allowed_origins import AllowedOrigins
from mcp_bridge.server.bridge import Bridge
from mcp_bridge.server.slots import Slots
from mcp_bridge.server.streams import (
    RETRY_MS,
    EventPlace,
    Stream,
    ends,
    event_id,
    forgotten,
    read_event_id,
)
from mcp_bridge.worker_relay import Emit, OwnerGone

log = logging.getLogger(__name__)

Scope = Any
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Headers = list[tuple[str, str]]

MAX_BODY_BYTES = 4 * 1024 * 1024
BODY_TIMEOUT_S = 30.0
ENDING_S = 20.0
"""Time to clean up after a client has left, such as to end a session at a server."""
PATIENCE_S = 0.05
"""How long an answer is awaited before the request watches for the client to leave."""
KEEPALIVE_S = 15.0  # of silence
STALLED_READER_S = 60.0
"""A client that reads nothing for so long is disconnected."""
MAX_QUEUED = 256
MAX_OPEN = 4096  # requests and streams per worker
MAX_OPEN_OF_ORG = 1280  # per tenant and worker
FIRST_LOOK_S, LAST_LOOK_S = 0.05, 1.0
"""How often a stream that another worker writes is polled."""
ABOUT_RESOURCES = frozenset({"resources/read", "resources/subscribe", "resources/unsubscribe"})
"""Requests that name a resource."""
LEFT = "left"
"""The outcome of a message whose client has gone."""
JSON = b"application/json"
SSE_HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]


class ClientGone(Exception):
    """The client left before its request was there, or takes nothing of what it gets."""


class HttpEndpoint:
    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._slots = Slots(MAX_OPEN, MAX_OPEN_OF_ORG)

    async def serve(
        self,
        caller: Caller,
        namespace: str | None,
        allowed: AllowedOrigins,
        pages: Collection[str],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Serve one request. `pages`: origins that the tenant lets in, beside our own."""
        headers: Headers = [
            (name.decode("latin-1").lower(), value.decode("latin-1"))
            for name, value in scope["headers"]
        ]
        found = self._bridge.endpoint(
            caller.org_id, namespace, caller.user_id, project_id=caller.project_id, prunes=True
        )
        endpoint = found or Endpoint(key="", upstreams=(), keeps_names=False)
        request = EndpointRequest(self._bridge, caller, endpoint, headers, receive, send)
        has_slot = False
        try:
            named = dict(headers)
            allowed.check(named.get("host"), named.get("origin"), pages)
            if found is None:
                raise RpcError(INVALID_REQUEST, "No such namespace", status=404)
            has_slot = self._slots.take(caller.org_id)
            if not has_slot:
                status = 503 if self._slots.is_full else 429
                raise RpcError(INTERNAL_ERROR, "Too many requests are open", status=status)
            await request.serve(scope["method"])
        except ClientGone:
            return
        except RpcError as error:
            await request.fail(error)
        except RedisError as error:
            log.warning("mcp: Redis: %s", type(error).__name__)
            await request.fail(RpcError(INTERNAL_ERROR, "Temporarily unavailable", status=503))
        finally:
            if has_slot:
                self._slots.give_back(caller.org_id)


class EndpointRequest:
    """An HTTP request and its response."""

    def __init__(
        self,
        bridge: Bridge,
        caller: Caller,
        endpoint: Endpoint,
        headers: Headers,
        receive: Receive,
        send: Send,
    ) -> None:
        self._bridge, self._caller, self._endpoint = bridge, caller, endpoint
        self._headers, self._receive, self._send = headers, receive, send
        self._header = dict(headers)
        self._id: rpc.RequestId | None = None
        self._started = False
        self._legacy = True
        self._stage = Stage("mcp_message", 0.0)
        """The message that is answered."""

    async def serve(self, method: str) -> None:
        """Raises: RpcError, where nothing was sent yet."""
        self._legacy = is_legacy(self._header.get(VERSION_HEADER, ""))
        if method == "POST":
            message = await self._message()
            if rpc.is_request(message):
                self._id = message["id"]
                note_client_trace(rpc.meta_of(rpc.params_of(message)))
            if "method" in message:
                self._stage = current_stages().begin("mcp_message", target_of(message))
                self._stage.ref = "" if self._id is None else str(self._id)[:MAX_STAGE_NAME]
            with self._stage:
                try:
                    await (
                        self._legacy_post(message) if self._legacy else self._modern_post(message)
                    )
                except RpcError as error:
                    self._stage.outcome = str(error.code)
                    raise
                except ClientGone:
                    self._stage.outcome = LEFT
                    raise
        elif method == "GET" and self._legacy:
            await self._legacy_get()
        elif method == "DELETE" and self._legacy:
            session = await self._session()
            await self._bridge.legacy.end(self._endpoint, session)
            await self._reply(200, None)
        else:
            allowed = b"GET, POST, DELETE" if self._legacy else b"POST"
            await self._reply(405, None, [(b"allow", allowed)])

    async def fail(self, error: RpcError) -> None:
        """Send an error; a stream that has begun just ends."""
        if self._started:
            return
        status = error.status or rpc.STATUS.get(error.code, 200)
        if self._legacy and self._id is not None and error.status is None:
            status = 200
        await self._reply(status, rpc.failure(self._id, error))

    async def _message(self) -> Message:
        """Raises: RpcError, Gone."""
        kind = self._header.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RpcError(INVALID_REQUEST, "Content-Type: application/json is wanted", status=415)
        if not accepts(self._header.get("accept", "*/*")):
            said = "Accept: application/json and text/event-stream are wanted"
            raise RpcError(INVALID_REQUEST, said, status=406)
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    event = await self._receive()
                    if event["type"] == "http.disconnect":
                        raise ClientGone
                    body += event.get("body", b"")
                    if len(body) > MAX_BODY_BYTES:
                        said = f"The body is too large: more than {MAX_BODY_BYTES} bytes"
                        raise RpcError(INVALID_REQUEST, said, status=413)
                    if not event.get("more_body", False):
                        break
        except TimeoutError:
            raise RpcError(INVALID_REQUEST, "The body did not come", status=408) from None
        try:
            return rpc.decode(bytes(body), MAX_VALUES)
        except RpcError as error:
            error.status = 400
            raise

    # The newer era.

    async def _modern_post(self, message: Message) -> None:
        if rpc.is_notification(message):
            version = self._header.get(VERSION_HEADER, "")
            if version != MODERN:
                supported = {"supported": [MODERN], "requested": version}
                raise RpcError(UNSUPPORTED_VERSION, "Unsupported protocol version", supported)
            await self._reply(202, None)  # this era's clients cancel by disconnecting
            return
        if rpc.is_response(message):
            raise RpcError(INVALID_REQUEST, "A request is wanted", status=400)
        envelope = read_envelope(message, self._headers)
        self._stage.protocol = envelope.version
        said: asyncio.Queue[Message] = asyncio.Queue(MAX_QUEUED)
        loop = asyncio.get_running_loop()
        has_message: asyncio.Future[None] = loop.create_future()

        async def say(message: Message) -> None:
            await said.put(message)
            if not has_message.done():
                has_message.set_result(None)

        answer = loop.create_task(self._answer_modern(envelope, message, say))
        tasks: list[asyncio.Task[Any]] = [answer]
        first: set[asyncio.Future[Any]] = {answer, has_message}
        try:
            await asyncio.wait(first, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            if has_message.done() or not answer.done():
                tasks.append(disconnect := loop.create_task(self._wait_for_disconnect()))
                await self._send_until(answer, disconnect, said)
                if disconnect.done():
                    self._stage.outcome = LEFT
                    return
            await self._end_with(answer, message["id"])
        finally:
            await end_tasks(*tasks, again_s=ENDING_S)

    async def _answer_modern(
        self, envelope: Envelope, message: Message, emit: Emit
    ) -> dict[str, Any]:
        """Raises: RpcError."""
        own = sign_in.without_answer(message)
        try:
            return await self._bridge.modern.answer(
                self._caller, self._endpoint, envelope, own, self._headers, emit
            )
        except RpcError as error:
            asked = sign_in.asked_to_sign_in(error, message, envelope, self._bridge.info)
            if asked is None:
                raise
            return asked

    async def _send_until(
        self,
        answer: asyncio.Task[dict[str, Any]],
        disconnect: asyncio.Task[None],
        said: asyncio.Queue[Message],
    ) -> None:
        """Stream messages until the answer is there and all messages before it are sent, or the
        client has disconnected."""
        loop = asyncio.get_running_loop()
        next_message = loop.create_task(said.get())
        try:
            while not disconnect.done():
                waited: set[asyncio.Task[Any]] = {answer, disconnect, next_message}
                done, _ = await asyncio.wait(
                    waited, timeout=KEEPALIVE_S, return_when=asyncio.FIRST_COMPLETED
                )
                if next_message in done:
                    await self._event(encoded(next_message.result()))
                    next_message = loop.create_task(said.get())
                elif answer in done:
                    while not said.empty():
                        await self._event(encoded(said.get_nowait()))
                    return
                elif not done:
                    await self._event(sse.KEEPALIVE)
        finally:
            next_message.cancel()

    async def _end_with(self, answer: asyncio.Task[dict[str, Any]], id_: rpc.RequestId) -> None:
        try:
            message = rpc.result(id_, answer.result())
            self._stage.outcome = outcome_of(message)
        except RpcError as error:
            if not self._started:
                raise
            message = rpc.failure(id_, error)
            self._stage.outcome = outcome_of(message)
        except RedisError:
            if not self._started:
                raise
            message = rpc.failure(id_, RpcError(INTERNAL_ERROR, "Temporarily unavailable"))
        if self._started:
            await self._event(encoded(message), more=False)
        else:
            await self._reply(200, message)

    # The older era.

    async def _legacy_post(self, message: Message) -> None:
        if message.get("method") == "initialize" and "id" in message:
            session, result = await self._bridge.legacy.initialize(
                self._caller, self._endpoint, rpc.params_of(message)
            )
            self._stage.protocol = session.about.version
            extra = [(SESSION_HEADER.encode(), session.id.encode())]
            await self._reply(200, rpc.result(message["id"], result), extra)
            return
        session = await self._session()
        self._stage.protocol = session.about.version
        if not rpc.is_request(message):
            try:
                await self._bridge.legacy.take(session, message)
            except RpcError as error:
                error.status = 400
                raise
            await self._reply(202, None)
            return
        stream = self._bridge.legacy.begin(self._endpoint, session, message)
        await self._send_stream(stream)

    async def _session(self) -> Session:
        """Raises: RpcError."""
        version = self._header.get(VERSION_HEADER, "")
        if version not in ("", *LEGACY_VERSIONS):
            raise RpcError(INVALID_REQUEST, f"{VERSION_HEADER}: not supported", status=400)
        id_ = self._header.get(SESSION_HEADER)
        if id_ is None:
            raise RpcError(INVALID_REQUEST, f"{SESSION_HEADER}: is missing", status=400)
        return await self._bridge.legacy.find(self._caller, self._endpoint, id_)

    async def _send_stream(self, stream: Stream) -> None:
        """Send what a stream says, until it ends or the client leaves, which ends nothing."""
        try:
            if not await self._send_first(stream):
                await self._send_rest(stream)
        finally:
            stream.leave()

    async def _send_first(self, stream: Stream) -> bool:
        """Send what comes at once, and return whether that was all."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                frame = await stream.next()
        except TimeoutError:
            return False
        if frame is None:
            await self._finish(stream)
            return True
        await self._event(frame)
        return False

    async def _send_rest(self, stream: Stream) -> None:
        loop = asyncio.get_running_loop()
        disconnect = loop.create_task(self._wait_for_disconnect())
        next_message = loop.create_task(stream.next())
        try:
            while not disconnect.done():
                waited: set[asyncio.Task[Any]] = {disconnect, next_message}
                done, _ = await asyncio.wait(
                    waited, timeout=KEEPALIVE_S, return_when=asyncio.FIRST_COMPLETED
                )
                if next_message in done:
                    frame = next_message.result()
                    if frame is None:
                        await self._finish(stream)
                        return
                    await self._event(frame)
                    next_message = loop.create_task(stream.next())
                elif not done:
                    await stream.prime()
                    await self._event(sse.KEEPALIVE)
        finally:
            await end_tasks(disconnect, next_message)

    async def _finish(self, stream: Stream) -> None:
        if stream.answer is not None:
            self._stage.outcome = outcome_of(stream.answer)
        if self._started:
            await self._event(b"", more=False)
        elif stream.answer is not None and not stream.primed:
            await self._reply(200, stream.answer)
        else:
            await self._reply(202, None)

    async def _legacy_get(self) -> None:
        session = await self._session()
        last = self._header.get(LAST_EVENT_HEADER)
        if last is None:
            await self._listen(session)
        else:
            await self._resume(session, last)

    async def _listen(self, session: Session) -> None:
        """Send what is said outside of requests from now on."""
        streams = self._bridge.legacy.streams
        stream = await streams.listen(self._endpoint, session)
        try:
            await self._event(sse.KEEPALIVE)
            await self._send_stream(stream)
        finally:
            streams.stop(session, stream)

    async def _resume(self, session: Session, last: str) -> None:
        """Raises: RpcError."""
        place = read_event_id(last)
        sessions, relay = self._bridge.sessions, self._bridge.relay
        head = None if place is None else await sessions.head_of(session, place.stream)
        if place is None or head is None:
            said = f"{LAST_EVENT_HEADER}: nothing is kept of it"
            raise RpcError(INVALID_REQUEST, said, status=400)
        owner, request_id = head.owner, head.request_id
        if request_id is None:  # a session's own stream, of which nothing is kept
            await self._listen(session)
            return
        if await self._is_answered(session, place, request_id):
            await self._event(sse.KEEPALIVE, more=False)
            return
        number, pause_s, quiet_s = place.number, FIRST_LOOK_S, 0.0
        disconnect = asyncio.get_running_loop().create_task(self._wait_for_disconnect())
        try:
            await self._event(sse.encode(b"", id=last, retry_ms=RETRY_MS))
            while not disconnect.done():
                events = await sessions.read_on(session, place.stream, number)
                for number, data in events:
                    await self._event(
                        sse.encode(data, b"message", id=event_id(place.stream, number))
                    )
                    if ends(data, request_id):
                        await self._event(b"", more=False)
                        return
                if events:
                    pause_s, quiet_s = FIRST_LOOK_S, 0.0
                    continue
                if not await relay.is_alive(owner):
                    gone = rpc.encode(rpc.failure(request_id, OwnerGone()))
                    await self._event(sse.encode(gone, b"message"), more=False)
                    return
                if quiet_s >= KEEPALIVE_S:
                    quiet_s = 0.0
                    if await sessions.head_of(session, place.stream) is None:
                        gone = rpc.encode(rpc.failure(request_id, forgotten()))
                        await self._event(sse.encode(gone, b"message"), more=False)
                        return
                    await self._event(sse.KEEPALIVE)
                await asyncio.wait({disconnect}, timeout=pause_s)
                quiet_s += pause_s
                pause_s = min(2 * pause_s, LAST_LOOK_S)
        finally:
            await end_tasks(disconnect)

    async def _is_answered(
        self, session: Session, last: EventPlace, request_id: rpc.RequestId
    ) -> bool:
        """True if the client had the answer last: nothing comes after it."""
        events = await self._bridge.sessions.read_on(session, last.stream, last.number - 1)
        return bool(events) and events[0][0] == last.number and ends(events[0][1], request_id)

    # HTTP.

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue

    async def _event(self, frame: bytes, *, more: bool = True) -> None:
        if not self._started:
            self._started = True
            start = {"type": "http.response.start", "status": 200, "headers": SSE_HEADERS}
            await self._send(start)
        try:
            async with asyncio.timeout(STALLED_READER_S):
                await self._send({"type": "http.response.body", "body": frame, "more_body": more})
        except TimeoutError:
            raise ClientGone from None

    async def _reply(
        self,
        status: int,
        message: Message | None,
        extra: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        self._started = True
        body = b"" if message is None else rpc.encode(message)
        headers = [(b"content-length", b"%d" % len(body)), *(extra or [])]
        if message is not None:
            headers.append((b"content-type", JSON))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def target_of(message: Message) -> str:
    """Return the method of a message, and of a tool or a prompt the name, of a resource where it
    is."""
    method = str(message["method"])[:MAX_STAGE_NAME]
    if method in ("tools/call", "prompts/get"):
        target = str(rpc.params_of(message).get("name", ""))
    elif method in ABOUT_RESOURCES:
        target = place_of(str(rpc.params_of(message).get("uri", "")))
    else:
        return method
    return f"{method} {target[:MAX_STAGE_NAME]}"


def place_of(uri: str) -> str:
    """Return a URI without what may be secret in it: who asks, and the query."""
    uri = uri.partition("#")[0].partition("?")[0]
    scheme, slashes, rest = uri.partition("://")
    if not slashes:
        return uri
    authority, slash, path = rest.partition("/")
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"


def outcome_of(answer: Message) -> str:
    """Return why the answer to a message is a failure: the code of an error, or that a tool says
    so; empty: it is none."""
    if isinstance(failed := answer.get("error"), dict):
        return str(failed.get("code"))
    result = answer.get("result")
    return TOOL_ERROR if isinstance(result, dict) and result.get("isError") is True else ""


def accepts(value: str) -> bool:
    """True if the client accepts JSON and events: which of them it gets is not known before."""
    kinds = {each.partition(";")[0].strip().lower() for each in value.split(",")}
    json = kinds & {"*/*", "application/*", "application/json"}
    return bool(json and kinds & {"*/*", "text/*", "text/event-stream"})


def encoded(message: Message) -> bytes:
    """Return a message as a server-sent event."""
    return sse.encode(rpc.encode(message), b"message")
