"""Shares one connection to a server on stdio or SSE among all callers of its owner.

Ids, progress tokens and subscriptions of callers are mapped to those of the connection, so that
nobody gets messages of another caller. A server of the older era gets one handshake, and all our
sessions there stand for this connection. A request of the server goes to the only call under way;
with several it is refused, since nothing says which call it belongs to.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec

from foundation.tasks import TaskSet
from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.eras import (
    ASSUMED_VERSION,
    CAPABILITIES_META,
    INFO_META,
    LEGACY,
    LEGACY_VERSIONS,
    LIST_CHANGES,
    MODERN,
    RESOURCE_UPDATED,
    SUBSCRIPTION_META,
    VERSION_META,
    Era,
)
from mcp_bridge.protocol.rpc import METHOD_NOT_FOUND, Message, RpcError
from mcp_bridge.upstream.transport import StreamTransport, TransportFailed, ignore

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""How long to wait for the answer to `server/discover`; servers of the older era may send none."""
HANDSHAKE_S = 15.0
MAX_UNDER_WAY = 1024
MAX_SUBSCRIBED = 10_000
MAX_NOTES = 256
MAX_DIGITS = 20
"""No request of ours has an id with so many."""
MAX_NOTE_BYTES = 16 * 1024 * 1024
"""Bytes of messages that wait for one caller; the oldest are dropped first."""

OFFERED_CAPABILITIES: dict[str, Any] = {"elicitation": {}}
SAMPLING = "sampling"

Emit = Callable[[Message], Awaitable[None]]
LISTENING: Message = {}
"""The first message to a listener: from now on it misses nothing."""
SENT: Message = {"sent": True}
"""The first message to a caller: from now on the server may have got the request."""


class ChannelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as Streamable HTTP has it. `asker`: the transport whose ids it uses."""

    asker: str
    method: str
    message: Message | None
    session: str | None


class ChannelResult(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a request."""

    status: int
    session: str | None = None
    message: Message | None = None


class Inbox:
    """The messages for one caller."""

    def __init__(self) -> None:
        self._notes: deque[tuple[int, Message]] = deque()
        self._bytes = 0
        self._answer: Message | None = None
        self._failure: TransportFailed | None = None
        self._has_any = asyncio.Event()

    def note(self, message: Message) -> None:
        size = len(rpc.encode(message))
        self._notes.append((size, message))
        self._bytes += size
        while len(self._notes) > MAX_NOTES or self._bytes > MAX_NOTE_BYTES:
            self._bytes -= self._notes.popleft()[0]
        self._has_any.set()

    def end(self, answer: Message) -> None:
        self._answer = answer
        self._has_any.set()

    def fail(self, failure: TransportFailed) -> None:
        self._failure = failure
        self._has_any.set()

    async def drain(self, emit: Emit) -> Message:
        """Return the answer; other messages go to `emit`. Raises: TransportFailed."""
        while True:
            await self._has_any.wait()
            self._has_any.clear()
            while self._notes:
                size, message = self._notes.popleft()
                self._bytes -= size
                await emit(message)
            if self._answer is not None:
                return self._answer
            if self._failure is not None:
                raise self._failure


class PendingRequest(msgspec.Struct, frozen=True, kw_only=True):
    asker: str
    id: rpc.RequestId
    token: Any
    inbox: Inbox


class Channel:
    """An open connection with many callers.

    Call `start` while `run` runs, then `ask` until the server ends it. `sampling`: the sampling
    capability that the server is told of; None: there is none. `on_change`: called when the server
    says that its offer changed, whoever listens. `era`: the only one that is tried; "auto": the
    newer one, then the older.
    """

    def __init__(
        self,
        server: str,
        info: dict[str, Any],
        stream: StreamTransport,
        *,
        sampling: dict[str, Any] | None = None,
        on_change: Callable[[], None] = ignore,
        era: Era = "auto",
    ) -> None:
        self.server, self._on_change, self._era = server, on_change, era
        self._offered = OFFERED_CAPABILITIES | ({} if sampling is None else {SAMPLING: sampling})
        self.id = secrets.token_hex(8)
        self.modern = False
        self.answered = False
        """Whether the server answered a request since this was last reset."""
        self._info, self._stream = info, stream
        self._about: dict[str, Any] = {}
        self._ids = itertools.count(1)
        self._under_way: dict[int, PendingRequest] = {}
        self._listening: dict[Inbox, str] = {}
        self._subscribed: dict[str, set[str]] = {}
        self._failure: TransportFailed | None = None

    # The connection.

    @property
    def has_ended(self) -> bool:
        return self._failure is not None

    async def run(self) -> None:
        """Take messages until the connection ends. Raises: TransportFailed, with which all waiting
        callers fail too."""
        failure = TransportFailed("upstream_ended")
        try:
            async for message in self._stream.messages():
                await self._take(message)
            raise failure
        except TransportFailed as error:
            failure = error
            raise
        finally:
            self._failure = failure
            for one in self._under_way.values():
                one.inbox.fail(failure)
            for inbox in self._listening:
                inbox.fail(failure)

    async def start(self) -> None:
        """Start the connection, while `run` runs. Raises: TransportFailed."""
        try:
            if not self._stream.legacy_only and self._era != LEGACY:
                await self._discover()
            if not self.modern and self._era == MODERN:
                raise TransportFailed("version")
            if not self.modern:
                async with asyncio.timeout(HANDSHAKE_S):
                    await self._initialize()
        except TimeoutError:
            raise TransportFailed("handshake") from None

    async def _discover(self) -> None:
        meta = {VERSION_META: MODERN, CAPABILITIES_META: {}, INFO_META: self._info}
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                found = await self._own("server/discover", {"_meta": meta})
                about = found.get("result")
                versions = about.get("supportedVersions") if isinstance(about, dict) else None
                if isinstance(about, dict) and isinstance(versions, list) and MODERN in versions:
                    self.modern, self._about = True, about

    async def _initialize(self) -> None:
        params = {
            "protocolVersion": LEGACY,
            "capabilities": self._offered,
            "clientInfo": self._info,
        }
        found = await self._own("initialize", params)
        about = found.get("result")
        if not isinstance(about, dict):
            raise TransportFailed("handshake")
        if about.get("protocolVersion") not in LEGACY_VERSIONS:
            # 2024-11-05 has the messages of the revision after it.
            about = {**about, "protocolVersion": ASSUMED_VERSION}
        self._about = about
        await self._stream.send(rpc.notification("notifications/initialized"))

    async def _own(self, method: str, params: dict[str, Any]) -> Message:
        return await self._request("", 0, method, params, ignored)

    # Messages from the server.

    async def _take(self, message: Message) -> None:
        if rpc.is_response(message):
            self._take_response(message)
        elif rpc.is_request(message):
            await self._take_request(message)
        elif rpc.is_notification(message):
            self._take_note(message)

    def _take_response(self, message: Message) -> None:
        id_ = message.get("id")
        found = self._under_way.get(id_) if isinstance(id_, int) else None
        if found is not None:
            self.answered = True
            found.inbox.end({**message, "id": found.id})

    async def _take_request(self, message: Message) -> None:
        if message["method"] == "ping":
            await self._stream.send(rpc.result(message["id"], {}))
            return
        only = self._only()
        if only is None:
            error = RpcError(METHOD_NOT_FOUND, "Nobody can be asked this now")
            await self._stream.send(rpc.failure(message["id"], error))
        else:
            only.inbox.note(message)

    def _only(self) -> PendingRequest | None:
        """Return the call under way, if there is exactly one."""
        found = [one for one in self._under_way.values() if one.asker]
        return found[0] if len(found) == 1 else None

    def _take_note(self, message: Message) -> None:
        method, params = message["method"], rpc.params_of(message)
        subscription = rpc.meta_of(params).get(SUBSCRIPTION_META)
        if method in LIST_CHANGES:
            self._on_change()
        if method == "notifications/progress":
            self._pass(params.get("progressToken"), message, "progressToken")
        elif subscription is not None:
            self._pass_subscribed(subscription, message)
        elif method in LIST_CHANGES or method == RESOURCE_UPDATED:
            uri = params.get("uri")
            for inbox, session in self._listening.items():
                if method in LIST_CHANGES or session in self._subscribed.get(str(uri), ()):
                    inbox.note(message)
        elif (only := self._only()) is not None:
            only.inbox.note(message)

    def _pass(self, own: Any, message: Message, field: str) -> None:
        found = self._under_way.get(own) if isinstance(own, int) else None
        if found is not None and found.token is not None:
            params = {**rpc.params_of(message), field: found.token}
            found.inbox.note({**message, "params": params})

    def _pass_subscribed(self, own: Any, message: Message) -> None:
        written = str(own)
        number = int(written) if written.isdecimal() and len(written) < MAX_DIGITS else -1
        found = self._under_way.get(number)
        if found is not None:
            params = rpc.params_of(message)
            meta = {**rpc.meta_of(params), SUBSCRIPTION_META: found.id}
            found.inbox.note({**message, "params": {**params, "_meta": meta}})

    # Messages to the server.

    async def ask(self, ask: ChannelRequest, emit: Emit) -> ChannelResult:
        """Raises: TransportFailed."""
        message = ask.message
        if ask.method == "DELETE":
            return self._end(ask.session)
        if not self.modern and not self._knows(ask):
            return ChannelResult(status=404)
        if ask.method == "GET" or message is None:
            return await self._listen(ask.session, emit)
        if not rpc.is_request(message):
            await self._pass_on(ask.asker, message)
            return ChannelResult(status=202)
        method, id_ = message["method"], message["id"]
        if method == "server/discover":
            if self.modern:
                return ChannelResult(status=200, message=rpc.result(id_, self._about))
            return ChannelResult(status=404)
        if method == "initialize" and not self.modern:
            session = f"{self.id}.{secrets.token_hex(8)}"
            return ChannelResult(status=200, session=session, message=rpc.result(id_, self._about))
        if method in ("resources/subscribe", "resources/unsubscribe") and not self.modern:
            if not self._counted(method, ask.session or "", message):
                return ChannelResult(status=200, message=rpc.result(id_, {}))
        params = rpc.params_of(message)
        found = await self._request(ask.asker, id_, method, params, emit)
        return ChannelResult(status=200, message=found)

    def _knows(self, ask: ChannelRequest) -> bool:
        """True if the request belongs to a session of this connection, or begins one."""
        if ask.session is not None:
            return ask.session.partition(".")[0] == self.id
        method = (ask.message or {}).get("method")
        return method in ("initialize", "server/discover")

    async def _request(
        self,
        asker: str,
        id_: rpc.RequestId,
        method: str,
        params: dict[str, Any],
        emit: Emit,
    ) -> Message:
        inbox = Inbox()
        if self._failure is not None:
            raise self._failure
        if len(self._under_way) >= MAX_UNDER_WAY:
            raise TransportFailed("too_many_requests")
        own = next(self._ids)
        token = rpc.meta_of(params).get("progressToken")
        if token is not None:
            params = {**params, "_meta": {**rpc.meta_of(params), "progressToken": own}}
        self._under_way[own] = PendingRequest(asker=asker, id=id_, token=token, inbox=inbox)
        answered = False
        try:
            await emit(SENT)
            await self._stream.send(rpc.request(own, method, params))
            found = await inbox.drain(emit)
            answered = True
            return found
        finally:
            del self._under_way[own]
            if not answered and self._failure is None:
                self._cancel_soon(own)

    def _cancel_soon(self, own: int) -> None:
        """Cancel a request at the server whose caller has left."""
        params = {"requestId": own, "reason": "nobody waits for it"}
        message = rpc.notification("notifications/cancelled", params)
        _cancelling.spawn(self._send_quietly(message))

    async def _send_quietly(self, message: Message) -> None:
        with suppress(TransportFailed, TimeoutError):
            async with asyncio.timeout(HANDSHAKE_S):
                await self._stream.send(message)

    async def _pass_on(self, asker: str, message: Message) -> None:
        method = message.get("method")
        if method == "notifications/initialized":
            return  # sent once, when the connection began
        if method == "notifications/cancelled":
            wanted = rpc.params_of(message).get("requestId")
            for own, one in self._under_way.items():
                if one.asker == asker and one.id == wanted:
                    params = {**rpc.params_of(message), "requestId": own}
                    await self._stream.send({**message, "params": params})
            return
        await self._stream.send(message)

    # Listeners.

    async def _listen(self, session: str | None, emit: Emit) -> ChannelResult:
        inbox = Inbox()
        if self._failure is not None:
            raise self._failure
        if len(self._listening) >= MAX_UNDER_WAY:
            return ChannelResult(status=503)
        self._listening[inbox] = session or ""
        try:
            await emit(LISTENING)
            await inbox.drain(emit)
        finally:
            del self._listening[inbox]
        raise AssertionError("a listener gets no answer")

    def _counted(self, method: str, session: str, message: Message) -> bool:
        """Count a subscription, and return whether it has to be sent: to the server all sessions
        are one subscriber."""
        uri = str(rpc.params_of(message).get("uri"))
        if method == "resources/subscribe":
            if uri not in self._subscribed and len(self._subscribed) >= MAX_SUBSCRIBED:
                raise TransportFailed("too_many_subscriptions")
            self._subscribed.setdefault(uri, set()).add(session)
            return True
        sessions = self._subscribed.get(uri, set())
        sessions.discard(session)
        if sessions:
            return False
        self._subscribed.pop(uri, None)
        return True

    def _end(self, session: str | None) -> ChannelResult:
        for uri, sessions in list(self._subscribed.items()):
            sessions.discard(session or "")
            if not sessions:
                del self._subscribed[uri]
        return ChannelResult(status=200)


_cancelling = TaskSet()


async def ignored(_: Message) -> None:
    """Drop messages that come during the handshake."""
