"""The guard between clients and servers, as the protocol sees it: it decides which of a server's
offer is shown, and whether a request goes out.

One object is injected: `Guard` itself for a bridge without trust, else a `trust.Trust`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Literal

import msgspec

from foundation.request_context import current_stages, outgoing_trace
from foundation.stages import Stage
from mcp_bridge.caller import Caller
from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.rpc import INVALID_PARAMS, Message, RpcError
from mcp_bridge.provenance import clean_message, clean_requests
from mcp_bridge.routing.catalog import Catalog, ServerListing, VisibleList
from mcp_bridge.routing.exchanges import (
    Answers,
    DeclinedEvent,
    Event,
    Exchange,
    NotificationEvent,
    QuestionEvent,
    ResultEvent,
    WaitEvent,
)
from mcp_bridge.upstream.upstream import Unreachable, Upstream, as_object
from mcp_bridge.validation.message_shapes import answer_problem

MAX_NOTIFICATIONS = 1000
NOTIFICATIONS_PER_S = 20
MAX_NOTIFICATION_BYTES = 4 * 1024 * 1024
NOTIFICATION_BYTES_PER_S = 256 * 1024

MAX_STAGE_NAME = 128
"""Characters of a tool's name that a stage has."""
TOOL_ERROR = "tool_error"
"""The outcome of a stage whose tool says that it failed, as OpenTelemetry's conventions name it."""

Outcome = Literal["done", "asked", "failed", "left"]
"""The outcome of a request that went out. `asked`: the client is to answer something first, and
then asks again; `left`: nobody waited for the end."""


class GuardedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it would go out. `alias`: the name of its tool or prompt for our client.
    `continues`: the client's state, which proves that the request went out before. `seen`: the
    server's approved listing, where `needs_listing` and there is a catalogue. `offer_age_s`: how
    long ago the server was asked for it; None: for this request. `is_modern`: the era that the
    server is asked in."""

    upstream: Upstream
    alias: str
    method: str
    params: Mapping[str, Any]
    continues: str | None = None
    seen: ServerListing | None = None
    offer_age_s: float | None = None
    is_modern: bool = True


def needs_listing(method: str, params: Mapping[str, Any]) -> bool:
    """True if the request is about a tool or a prompt, which the catalogue has to list."""
    if method == "completion/complete":
        return as_object(params.get("ref")).get("type") == "ref/prompt"
    return method in ("tools/call", "prompts/get")


class RequestPermit:
    """A permit for one request that may go out; this one neither checks nor records anything.

    `answer`: the result of a request that does not go out, since its result is known.
    """

    def __init__(self, answer: dict[str, Any] | None = None) -> None:
        self.answer = answer

    async def result(self, result: dict[str, Any]) -> dict[str, Any]:
        """Return what the client gets of a server's result. Raises: RpcError."""
        return result

    async def failed(self) -> None:
        """End it as failed, before its client is told."""
        self.ended("failed")

    def ended(self, outcome: Outcome) -> None:
        """Tell the outcome of the request; called once for each that went out."""


class Guard:
    """The guard of a bridge without trust: it shows everything and permits every request."""

    catalog: Catalog | None = None
    """The approved lists of servers, which may change though no server says so. None: lists are
    passed on as they are, and neither `shown_list` nor `list_digests` is called."""

    async def list_digests(
        self, caller: Caller, upstream: Upstream, seen: ServerListing
    ) -> Mapping[str, bytes]:
        """Return a digest of what the caller is shown of each list of a server, by the
        notification that says that the list changed. Raises: RpcError."""
        raise AssertionError("there is no catalogue")

    async def may_dial(self, caller: Caller, upstream: Upstream) -> bool:
        """True if this server may be dialled at all."""
        return True

    async def shown_instructions(
        self, caller: Caller, upstream: Upstream, instructions: str | None
    ) -> str | None:
        return instructions

    async def shown_list(
        self, caller: Caller, upstream: Upstream, method: str, seen: ServerListing
    ) -> VisibleList:
        """Return what the caller is shown of the list that `method` asks for. Raises: RpcError."""
        raise AssertionError("there is no catalogue")

    async def shown_items(
        self, caller: Caller, upstream: Upstream, method: str, items: list[Any]
    ) -> list[Any]:
        """Return what the caller is shown of a page of items that are not pinned."""
        return items

    async def shows_resource(self, caller: Caller, upstream: Upstream, uri: str) -> bool:
        """True if the caller may be told that the resource exists."""
        return True

    async def permit(self, caller: Caller, request: GuardedRequest) -> RequestPermit:
        """Check a request before it goes out. Raises: RpcError, if it must not go out."""
        return RequestPermit()

    async def note_message(self, caller: Caller, upstream: Upstream) -> None:
        """Note that the caller is about to get a message that the server wrote."""

    async def note_declined(
        self, caller: Caller, upstream: Upstream, method: str, name: str, reason: str
    ) -> None:
        """Note that the caller is not asked what the server wants to ask, and why. `name`: of what
        the caller asked for; empty outside of requests."""


STORM = DeclinedEvent("notifications", "too_many_notifications")
"""Recorded once of a server that says more during a request than is passed on."""


class NotificationBudget:
    """Bounds the notifications of one exchange, by number and by bytes: a storm of them must not
    keep its own answer. Both bounds refill: an hour of progress is no storm."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._at = clock, clock()
        self._left, self._bytes_left = float(MAX_NOTIFICATIONS), float(MAX_NOTIFICATION_BYTES)

    def take(self, message: Message, size: int | None = None) -> bool:
        """Return whether one more is passed on. False: it is dropped, and costs nothing. `size`:
        its bytes, where they were counted as it was read."""
        now = self._clock()
        passed, self._at = max(0.0, now - self._at), now
        self._left = min(MAX_NOTIFICATIONS, self._left + passed * NOTIFICATIONS_PER_S)
        self._bytes_left = min(
            MAX_NOTIFICATION_BYTES, self._bytes_left + passed * NOTIFICATION_BYTES_PER_S
        )
        if self._left < 1:
            return False
        if size is None:
            size = len(rpc.encode(message))
        if self._bytes_left < size:
            return False
        self._left -= 1
        self._bytes_left -= size
        return True


class GuardedExchange:
    """An exchange that begins only if the guard permits it, and whose result the guard checks.
    Questions and notifications before the result lose their hidden characters."""

    def __init__(
        self, inner: Exchange, guard: Guard, caller: Caller, request: GuardedRequest
    ) -> None:
        self._inner, self._guard = inner, guard
        self._caller, self._request = caller, request
        self.holds = inner.holds
        self._has_noted = False
        self._asked: dict[str, str] = {}
        """The method of each question that the client was asked last, by key."""
        self._declined: set[DeclinedEvent] = set()
        self._budget = NotificationBudget()

    @property
    def is_out(self) -> bool:
        return self._inner.is_out

    async def events(self) -> AsyncGenerator[Event]:
        permit = await self._guard.permit(self._caller, self._request)
        if permit.answer is not None:
            yield ResultEvent(permit.answer)
            return
        outcome: Outcome | None = None
        stage = self._begin_stage()
        self._inner.carry(outgoing_trace(stage, f"mcp/{self._request.upstream.name}"))
        try:
            async with aclosing(self._inner.events()) as events:
                async for found in events:
                    if isinstance(found, DeclinedEvent):
                        await self._note_declined(found)
                        continue
                    if not isinstance(found, WaitEvent):
                        await self._note_message()
                    if self._is_too_much(found):
                        await self._note_declined(STORM)
                        continue
                    event = clean_event(found)
                    if event is None:
                        continue
                    if isinstance(event, ResultEvent):
                        event = ResultEvent(await permit.result(event.result))
                        outcome = "done"
                        stage.outcome = TOOL_ERROR if event.result.get("isError") is True else ""
                    elif isinstance(event, QuestionEvent):
                        # Of a server that waits, several are open at once.
                        self._asked = (self._asked if self.holds else {}) | methods_of(event)
                        outcome = None if self.holds else "asked"
                    yield event
                    outcome = "done" if isinstance(event, ResultEvent) else None
        except Exception as error:
            outcome = "failed"
            await permit.failed()
            if isinstance(error, RpcError) and not isinstance(error, Unreachable):
                await self._note_message()
            raise
        finally:
            left: Outcome = "left" if self._inner.is_out else "failed"
            stage.end("" if outcome == "done" else outcome or left)
            if outcome != "failed":
                permit.ended(outcome or left)

    def _begin_stage(self) -> Stage:
        """Begin a stage of the client's request: the server is asked now."""
        server, method = self._request.upstream.name, self._request.method
        if method == "tools/call":
            name = str(self._request.params.get("name", ""))[:MAX_STAGE_NAME]
            return current_stages().begin("tool_call", f"{server}/{name}")
        return current_stages().begin("mcp_request", f"{server} {method}")

    def _is_too_much(self, event: Event) -> bool:
        if not isinstance(event, NotificationEvent):
            return False
        return not self._budget.take(event.message, event.size)

    async def _note_message(self) -> None:
        """Tell the guard once that a message of the server came: a result, error, question or
        notification."""
        if not self._has_noted:
            await self._guard.note_message(self._caller, self._request.upstream)
            self._has_noted = True

    async def _note_declined(self, declined: DeclinedEvent) -> None:
        """Record that the client is not asked something, once for each reason."""
        if declined in self._declined:
            return
        self._declined.add(declined)
        request = self._request
        name = str(request.params.get("name", request.params.get("uri", "")))
        place = self._caller, request.upstream
        await self._guard.note_declined(*place, declined.method, name, declined.reason)

    def carry(self, trace: Mapping[str, str]) -> None:
        self._inner.carry(trace)

    async def answer(self, answers: Answers) -> None:
        checked = {key: self._checked(key, answered) for key, answered in answers.items()}
        await self._inner.answer(checked)

    def _checked(self, key: str, answered: Message) -> Message:
        """Return a client's answer, or an error in the place of one that is none."""
        wrong = None
        if "error" not in answered:
            wrong = answer_problem(self._asked.get(key, ""), answered.get("result"))
        if wrong is None:
            return answered
        text = f"The client's answer does not conform: {wrong.path or '(root)'}: {wrong.message}"
        return {"error": RpcError(INVALID_PARAMS, text).to_error()}

    async def cancel(self, reason: str) -> None:
        await self._inner.cancel(reason)


def methods_of(event: QuestionEvent) -> dict[str, str]:
    return {key: str(request.get("method")) for key, request in event.requests.items()}


def clean_event(event: Event) -> Event | None:
    """Return an event without hidden characters; None: there is nothing to pass on.

    Raises: RpcError, for a question that cannot be asked.
    """
    if isinstance(event, NotificationEvent):
        message = clean_message(event.message)
        return None if message is None else NotificationEvent(message)
    if isinstance(event, QuestionEvent):
        return QuestionEvent(clean_requests(event.requests), event.state)
    return event
