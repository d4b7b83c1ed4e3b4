"""Runs one request at one server, in its era, until its result: what it says on the way, what it
asks.

An exchange is driven by who reads its `events`; between two of them it may rest, for as long as
somebody takes to answer. A request is sent once: a second time only where the server said that it
did nothing, as for a session that it no longer knew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from typing import Any, Protocol

import msgspec

from foundation.tasks import end_tasks
from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.allowed_fields import (
    ANY_ANSWER,
    answer_for_server,
    for_server,
    from_server_error,
    from_server_result,
    picked,
)
from mcp_bridge.protocol.continuation import MAX_QUESTIONS
from mcp_bridge.protocol.envelope import (
    Envelope,
    HeaderSchema,
    has_invalid_headers,
    modern_headers,
    param_headers,
)
from mcp_bridge.protocol.eras import INTERACTIVE, LISTS, NEEDED_CAPABILITY
from mcp_bridge.protocol.header_schemas import header_schemas_of
from mcp_bridge.protocol.questions import (
    URL,
    DeclinedQuestion,
    asked_mode,
    from_server_question,
    from_server_questions,
)
from mcp_bridge.protocol.rpc import (
    HEADER_MISMATCH,
    METHOD_NOT_FOUND,
    URL_NEEDED,
    Message,
    RpcError,
)
from mcp_bridge.protocol.translation import belongs_to, to_modern_params
from mcp_bridge.provenance import clean_error
from mcp_bridge.upstream.transport import ReadCount, TransportAnswer
from mcp_bridge.upstream.upstream import (
    MAX_RECONNECTS,
    SessionEnded,
    Unreachable,
    Upstream,
    UpstreamSession,
    as_object,
    legacy_headers,
)

log = logging.getLogger(__name__)

ASKABLE = frozenset(NEEDED_CAPABILITY.values())
"""Client capabilities that let a server ask the client something."""
MAX_ASKED = 32  # questions to a client at once
MAX_PAGES = 100
MAX_POLLS = 5_000
"""Bounds how often one request is polled after its server has closed the stream."""
MIN_RETRY_MS = 20  # whatever the server says


class NotificationEvent(msgspec.Struct, frozen=True):
    """The event of a notification. `size`: its bytes as they were read, where they were counted."""

    message: Message
    size: int | None = None


class WaitEvent(msgspec.Struct, frozen=True):
    """It takes longer: the server has closed its stream and will be asked again."""


class QuestionEvent(msgspec.Struct, frozen=True):
    """The event that the server asks the client something, by key.

    `state`: what a server of the newer era wants back.
    """

    requests: dict[str, Message]
    state: str | None = None


class DeclinedEvent(msgspec.Struct, frozen=True):
    """The event that the client is not asked what the server wants to ask, for the record."""

    method: str
    reason: str


class ResultEvent(msgspec.Struct, frozen=True):
    result: dict[str, Any]


Event = NotificationEvent | WaitEvent | QuestionEvent | DeclinedEvent | ResultEvent
AskPage = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Requests a page of a list by its parameters. Raises: RpcError."""
Answers = dict[str, Message]
"""By key, `{"result": ...}` or `{"error": ...}`."""


class SessionSource(Protocol):
    """The store of the sessions at servers of the older era."""

    async def get(self, upstream: Upstream) -> UpstreamSession: ...

    async def replace(self, upstream: Upstream, ended: UpstreamSession) -> UpstreamSession: ...

    def hearing(
        self, upstream: Upstream, session: UpstreamSession
    ) -> AbstractAsyncContextManager[asyncio.Queue[Message] | None]:
        """Yield a queue of the server's messages outside of requests, while a request is under way
        that they can be about. None: there are none, as by default."""
        return nullcontext()


class Exchange(Protocol):
    holds: bool
    """Whether it is open while the client thinks; if not, its answers can go with a new request."""

    @property
    def is_out(self) -> bool:
        """True if the server may have been asked."""
        ...

    def carry(self, trace: Mapping[str, str]) -> None:
        """Send the context of a trace with what is asked from now on."""
        ...

    def events(self) -> AsyncGenerator[Event]:
        """Raises: RpcError."""
        ...

    async def answer(self, answers: Answers) -> None:
        """Give the answers to what it asked last. Raises: RpcError."""
        ...

    async def cancel(self, reason: str) -> None: ...


class ModernExchange:
    holds = False

    def __init__(
        self, upstream: Upstream, envelope: Envelope, method: str, params: dict[str, Any]
    ) -> None:
        self._upstream, self._envelope = upstream, upstream.to_server_envelope(envelope)
        self._method, self._params = method, for_server(method, params, modern=True)
        self._next: dict[str, Any] | None = self._params
        self._state: str | None = None
        self._trace: Mapping[str, str] = {}
        self.is_out = False

    def carry(self, trace: Mapping[str, str]) -> None:
        self._trace = trace

    async def events(self) -> AsyncGenerator[Event]:
        while self._next is not None:
            params, self._next = self._next, None
            async with aclosing(self._once(params)) as events:
                async for event in events:
                    yield event

    async def _once(self, given: dict[str, Any]) -> AsyncGenerator[Event]:
        upstream, method = self._upstream, self._method
        params = to_modern_params(given, self._envelope)
        headers = modern_headers(method, params)
        if method == "tools/call":
            headers |= await self._param_headers(params)
        params, headers = with_trace(params, self._trace), {**headers, **self._trace}
        message = rpc.request(upstream.next_id(), method, params)
        async with upstream.ask("POST", message, headers, on_sent=self._sent) as answer:
            if answer.status >= 500:
                raise Unreachable(upstream.name, f"status_{answer.status}")
            async with aclosing(answer.messages()) as messages:
                async for found in messages:
                    if found is None or rpc.is_request(found):
                        continue
                    if rpc.is_notification(found):
                        if belongs_to(found, params):
                            yield NotificationEvent(found, answer.message_bytes)
                        continue
                    if found.get("id") not in (message["id"], None):
                        continue
                    try:
                        event = self._ended(found)
                    except DeclinedQuestion as error:
                        yield DeclinedEvent(error.method, error.reason)
                        raise
                    yield event
                    return
        raise Unreachable(upstream.name, "no_answer")

    def _sent(self) -> None:
        self.is_out = True

    def _ended(self, found: Message) -> Event:
        """Raises: RpcError."""
        if "error" in found:
            code = as_object(found["error"]).get("code")
            if code == HEADER_MISMATCH:
                self._upstream.schemas.clear()
            can = self._envelope.capabilities
            raise clean_error(from_server_error(found["error"], modern=True, declared=can))
        result = as_object(found.get("result"))
        kind = result.get("resultType", "complete")
        if kind == "complete":
            return ResultEvent(from_server_result(self._method, result, modern=True))
        if kind != "input_required" or self._method not in INTERACTIVE:
            raise Unreachable(self._upstream.name, "result_type")
        requests = from_server_questions(result.get("inputRequests"), self._envelope.capabilities)
        if len(requests) > MAX_ASKED:
            raise Unreachable(self._upstream.name, "too_many_requests")
        state = result.get("requestState")
        self._state = state if isinstance(state, str) else None
        if not requests and self._state is None:  # nothing to answer and nothing to go on with
            raise Unreachable(self._upstream.name, "result_type")
        return QuestionEvent(requests, self._state)

    async def answer(self, answers: Answers) -> None:
        given: dict[str, Any] = {}
        for key, answered in answers.items():
            if "error" in answered:
                raise rpc.from_error(answered["error"])
            given[key] = picked(as_object(answered.get("result")), ANY_ANSWER)
        self._next = {**self._params, "inputResponses": given}
        if self._state is not None:
            self._next["requestState"] = self._state

    async def cancel(self, reason: str) -> None:
        """Closing the answer's stream is all that the newer era knows."""

    async def _param_headers(self, params: dict[str, Any]) -> dict[str, str]:
        arguments = as_object(params.get("arguments"))
        if not arguments:
            return {}
        schema = await tool_schema(
            self._upstream, str(params.get("name")), self._envelope, sessions=None
        )
        return {} if schema is None else param_headers(schema, arguments)


class LegacyExchange:
    holds = True

    def __init__(
        self,
        upstream: Upstream,
        sessions: SessionSource,
        method: str,
        params: dict[str, Any],
        capabilities: dict[str, Any],
    ) -> None:
        self._upstream, self._sessions = upstream, sessions
        self._method, self._params = method, for_server(method, params, modern=False)
        self._capabilities = capabilities
        self._session: UpstreamSession | None = None
        self._id = upstream.next_id()
        self._asked: dict[str, tuple[rpc.RequestId, str]] = {}
        self._count = self._requests = 0
        self._spent = ReadCount()
        self._trace: Mapping[str, str] = {}
        self.is_out = False

    def carry(self, trace: Mapping[str, str]) -> None:
        self._trace = trace

    async def events(self) -> AsyncGenerator[Event]:
        session = await self._sessions.get(self._upstream)
        for is_last in (False, True):
            self._session = session
            try:
                async with (
                    self._hearing(session) as heard,
                    aclosing(self._all_of(session, heard)) as events,
                ):
                    async for event in events:
                        yield event
                return
            except SessionEnded:
                if is_last:
                    raise Unreachable(self._upstream.name, "session") from None
                session = await self._sessions.replace(self._upstream, session)

    def _hearing(
        self, session: UpstreamSession
    ) -> AbstractAsyncContextManager[asyncio.Queue[Message] | None]:
        """Listen to what the server says outside of requests, if the client can be asked
        something."""
        if self._method in INTERACTIVE and not self._capabilities.keys().isdisjoint(ASKABLE):
            return self._sessions.hearing(self._upstream, session)
        return nullcontext()

    async def _all_of(
        self, session: UpstreamSession, heard: asyncio.Queue[Message] | None
    ) -> AsyncGenerator[Event]:
        """Yield the events of the request's own streams, and of the session's.

        Raises: SessionEnded.
        """
        async with aclosing(self._run(session)) as said:
            if heard is None:
                async for event in said:
                    yield event
                return
            async with aclosing(both(said, heard)) as merged:
                async for found in merged:
                    if not isinstance(found, dict):
                        yield found
                    elif rpc.is_request(found):
                        async for asked in self._ask(found):
                            yield asked
                    elif belongs_to(found, self._params):
                        yield NotificationEvent(found)

    async def _run(self, session: UpstreamSession) -> AsyncGenerator[Event]:
        """Raises: SessionEnded, where it has done nothing."""
        message = rpc.request(self._id, self._method, with_trace(self._params, self._trace))
        headers = {**legacy_headers(session), **self._trace}
        asked = self._upstream.ask("POST", message, headers, on_sent=self._sent)
        last_id: str | None = None
        tries = polls = 0
        while True:
            async with asked as answer:
                if not polls and answer.status == 404 and session.id is not None:
                    self.is_out = False
                    raise SessionEnded
                if polls and (answer.status != 200 or not answer.is_stream):
                    break
                async with aclosing(self._read(answer)) as events:
                    async for event in events:
                        yield event
                        if isinstance(event, ResultEvent):
                            return
                tries = 0 if answer.last_id not in (None, last_id) else tries + 1
                last_id, retry_ms = answer.last_id or last_id, answer.retry_ms
            if last_id is None or tries >= MAX_RECONNECTS:
                break
            yield WaitEvent()
            polls += 1
            if polls > MAX_POLLS:
                raise Unreachable(self._upstream.name, "too_much")
            await asyncio.sleep(max(retry_ms, MIN_RETRY_MS) / 1000)
            asked = self._upstream.ask("GET", None, legacy_headers(session, last_id))
        raise Unreachable(self._upstream.name, "no_answer")

    def _sent(self) -> None:
        self.is_out = True

    async def _read(self, answer: TransportAnswer) -> AsyncGenerator[Event]:
        if answer.status >= 500 or (answer.status >= 400 and answer.kind != "application/json"):
            raise Unreachable(self._upstream.name, f"status_{answer.status}")
        async with aclosing(answer.messages(self._spent)) as messages:
            async for found in messages:
                if found is None:
                    continue
                if rpc.is_notification(found):
                    if belongs_to(found, self._params):
                        yield NotificationEvent(found, answer.message_bytes)
                elif rpc.is_request(found):
                    async for asked in self._ask(found):
                        yield asked
                elif found.get("id") in (self._id, None):
                    if "error" not in found:
                        result = as_object(found.get("result"))
                        yield ResultEvent(from_server_result(self._method, result, modern=False))
                        continue
                    can = self._capabilities
                    refused = from_server_error(found["error"], modern=False, declared=can)
                    error = clean_error(refused)
                    if error.code == URL_NEEDED:
                        try:
                            asked_mode({"mode": URL}, self._capabilities)
                        except DeclinedQuestion as declined:
                            yield DeclinedEvent(declined.method, declined.reason)
                            raise
                    raise error

    async def _ask(self, found: Message) -> AsyncGenerator[QuestionEvent | DeclinedEvent]:
        """Yield the question to the client, or that it is not asked; nothing, where nobody else
        has to answer."""
        if found["method"] == "ping":
            await self._reply(found["id"], {"result": {}})
            return
        method = found["method"]
        self._requests += 1
        if self._requests > MAX_QUESTIONS:  # also of those that are declined
            raise Unreachable(self._upstream.name, "too_many_questions")
        try:
            request = from_server_question(found, self._capabilities)
            if len(self._asked) >= MAX_ASKED:
                error = "Too many requests at once"
                raise DeclinedQuestion(METHOD_NOT_FOUND, error, method, "too_many_at_once")
        except DeclinedQuestion as declined:
            yield DeclinedEvent(declined.method, declined.reason)
            await self._reply(found["id"], {"error": declined.for_legacy_server()})
            return
        self._count += 1
        key = f"request-{self._count}"
        self._asked[key] = found["id"], method
        yield QuestionEvent({key: request})

    async def answer(self, answers: Answers) -> None:
        for key, answered in answers.items():
            asked = self._asked.pop(key, None)
            if asked is not None:
                id_, method = asked
                await self._reply(id_, answer_for_server(method, answered))

    async def _reply(self, id_: rpc.RequestId, answered: Message) -> None:
        assert self._session is not None
        try:
            await self._upstream.notify(self._session, {"jsonrpc": "2.0", "id": id_, **answered})
        except SessionEnded:
            raise Unreachable(self._upstream.name, "session") from None

    async def cancel(self, reason: str) -> None:
        """Told as far as it can be: what is not there needs no telling."""
        if self._session is None:
            return
        params = {"requestId": self._id, "reason": reason}
        message = rpc.notification("notifications/cancelled", params)
        try:
            await self._upstream.notify(self._session, message)
        except (SessionEnded, Unreachable):
            return


def with_trace(params: dict[str, Any], trace: Mapping[str, str]) -> dict[str, Any]:
    """Return parameters whose `_meta` names a trace (SEP-414), beside what it has."""
    return {**params, "_meta": {**rpc.meta_of(params), **trace}} if trace else params


async def both(
    said: AsyncGenerator[Event], heard: asyncio.Queue[Message]
) -> AsyncGenerator[Event | Message]:
    """Yield from both sources as they come, until `said` ends."""
    coming: asyncio.Task[Event | None] | None = None
    hearing: asyncio.Task[Message] | None = None
    try:
        while True:
            coming = coming or asyncio.create_task(next_of(said))
            hearing = hearing or asyncio.create_task(heard.get())
            await asyncio.wait((coming, hearing), return_when=asyncio.FIRST_COMPLETED)
            if hearing.done():
                found, hearing = hearing.result(), None
                yield found
            else:
                event, coming = coming.result(), None
                if event is None:
                    return
                yield event
    finally:
        await end_tasks(*(task for task in (coming, hearing) if task is not None))


async def next_of(said: AsyncGenerator[Event]) -> Event | None:
    return await anext(said, None)


def open_exchange(
    upstream: Upstream,
    *,
    modern: bool,
    sessions: SessionSource,
    envelope: Envelope,
    method: str,
    params: dict[str, Any],
) -> Exchange:
    if modern:
        return ModernExchange(upstream, envelope, method, params)
    can = upstream.to_server_envelope(envelope).capabilities
    return LegacyExchange(upstream, sessions, method, params, can)


async def result_of(exchange: Exchange) -> dict[str, Any]:
    """Return the result of a request during which a server asks nothing. Raises: RpcError."""
    async with aclosing(exchange.events()) as events:
        async for event in events:
            if isinstance(event, ResultEvent):
                return event.result
            if isinstance(event, QuestionEvent):
                refused = RpcError(METHOD_NOT_FOUND, "Nothing can be asked here").to_error()
                await exchange.answer({key: {"error": refused} for key in event.requests})
    raise AssertionError("an exchange ends with a result or raises")


async def pages_of(ask: AskPage) -> AsyncIterator[dict[str, Any]]:
    """Yield the pages of a list, at most MAX_PAGES. Raises: RpcError."""
    params: dict[str, Any] = {}
    for _ in range(MAX_PAGES):
        page = await ask(params)
        yield page
        if not has_next(page):
            return
        params = {"cursor": page["nextCursor"]}


def has_next(page: dict[str, Any]) -> bool:
    return isinstance(page.get("nextCursor"), str)


async def tool_schema(
    upstream: Upstream, name: str, envelope: Envelope, *, sessions: SessionSource | None
) -> HeaderSchema | None:
    """Return the schema of a tool's arguments that are headers, as it was listed last; None: it is
    not listed. `sessions`: None for a server of the newer era. Raises: RpcError."""
    found = upstream.schemas.get(name)
    if found is not None:
        return found

    async def ask(params: dict[str, Any]) -> dict[str, Any]:
        if sessions is None:
            return await result_of(ModernExchange(upstream, envelope, "tools/list", params))
        return await result_of(LegacyExchange(upstream, sessions, "tools/list", params, {}))

    async for page in pages_of(ask):
        for listed_name, schema in header_schemas_of(page):
            upstream.schemas.keep(listed_name, schema)
            found = schema if listed_name == name else found
        if found is not None:
            break
    return found


def without_misnamed(upstream: Upstream, page: dict[str, Any]) -> dict[str, Any]:
    """Return a page of tools of a server of the newer era, without those whose arguments could not
    travel as the headers that they want."""
    tools = page.get(LISTS["tools/list"])
    if not isinstance(tools, list):
        return page
    kept = [
        tool
        for tool in tools
        if not (isinstance(tool, dict) and has_invalid_headers(tool.get("inputSchema")))
    ]
    if len(kept) < len(tools):
        left_out = len(tools) - len(kept)
        log.info("mcp: %s: %d tools with impossible headers are left out", upstream.name, left_out)
    return {**page, LISTS["tools/list"]: kept}


def remember_schemas(upstream: Upstream, page: dict[str, Any]) -> None:
    for name, schema in header_schemas_of(page):
        upstream.schemas.keep(name, schema)
