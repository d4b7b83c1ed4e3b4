"""The guard between clients and servers, as the protocol sees it: it decides which of a server's
offer is shown, and whether a request goes out.

One object is injected; `AllowAll` is that of a bridge without trust, `trust.Trust` the real one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any, Literal, Protocol

import msgspec

from mcp_bridge.caller import Caller
from mcp_bridge.protocol.rpc import RpcError
from mcp_bridge.provenance import clean_message, clean_requests
from mcp_bridge.routing.catalog import Catalog, ServerListing, VisibleList
from mcp_bridge.routing.exchanges import (
    Answers,
    Event,
    Exchange,
    NotificationEvent,
    QuestionEvent,
    ResultEvent,
    WaitEvent,
)
from mcp_bridge.upstream.upstream import Unreachable, Upstream, as_object

Outcome = Literal["done", "asked", "failed", "left"]
"""Of a request that went out. `asked`: the client is to answer something first, and then asks
again; `left`: nobody waited for the end."""


class GuardedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it would go out. `alias`: what its tool or prompt is called in front of us.
    `continues`: the client's state says that it went out before, and what proves that. `seen`: the
    server's approved listing, where `needs_listing` and there is a catalogue."""

    upstream: Upstream
    alias: str
    method: str
    params: Mapping[str, Any]
    continues: str | None = None
    seen: ServerListing | None = None


def needs_listing(method: str, params: Mapping[str, Any]) -> bool:
    """True if the request is about a tool or a prompt, which the catalogue has to list."""
    if method == "completion/complete":
        return as_object(params.get("ref")).get("type") == "ref/prompt"
    return method in ("tools/call", "prompts/get")


class RequestPermit(Protocol):
    """A permit for one request that may go out."""

    @property
    def answered(self) -> dict[str, Any] | None:
        """The result, where nothing goes out after all."""
        ...

    async def result(self, result: dict[str, Any]) -> dict[str, Any]:
        """Return what the client gets of what the server said. Raises: RpcError."""
        ...

    def ended(self, outcome: Outcome) -> None:
        """Tell the outcome of the request; called once, whatever became of it."""
        ...


class KnownResult(msgspec.Struct, frozen=True):
    """A Passage of a call that does not go out: its result is known."""

    answered: dict[str, Any]

    async def result(self, result: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError("nothing went out")

    def ended(self, outcome: Outcome) -> None:
        """Do nothing: nothing began."""


class Guard(Protocol):
    @property
    def catalog(self) -> Catalog | None:
        """The approved lists of servers, which may change though no server says so. None: what
        servers list is passed on as it is, and no other method here is given a listing."""
        ...

    async def list_digests(
        self, caller: Caller, upstream: Upstream, seen: ServerListing
    ) -> Mapping[str, bytes]:
        """Return a digest of what the caller is shown of each list of a server, by the
        notification that says that the list changed. Raises: RpcError."""
        ...

    async def opens(self, caller: Caller, upstream: Upstream) -> bool:
        """True if this server may be dialled at all."""
        ...

    async def instructions(
        self, caller: Caller, upstream: Upstream, said: str | None
    ) -> str | None: ...

    async def offered(
        self, caller: Caller, upstream: Upstream, method: str, seen: ServerListing
    ) -> VisibleList:
        """Return what the caller is shown of the list that `method` asks for. Raises: RpcError."""
        ...

    async def screened(
        self, caller: Caller, upstream: Upstream, method: str, items: Iterable[Any]
    ) -> list[Any]:
        """Return what the caller is shown of a page of what is not pinned."""
        ...

    async def shows_resource(self, caller: Caller, upstream: Upstream, uri: str) -> bool:
        """True if the caller may be told that the resource is there."""
        ...

    async def before(self, caller: Caller, request: GuardedRequest) -> RequestPermit | None:
        """Check a request before it goes out. None: there is nothing to say of such a request.
        Raises: RpcError, if it is not to go out."""
        ...

    async def heard(self, caller: Caller, upstream: Upstream) -> None:
        """Note that the caller is about to be told what a server says of its own."""
        ...


class AllowAll:
    catalog = None

    async def list_digests(
        self, caller: Caller, upstream: Upstream, seen: ServerListing
    ) -> Mapping[str, bytes]:
        raise AssertionError("there is no catalogue")

    async def opens(self, caller: Caller, upstream: Upstream) -> bool:
        return True

    async def instructions(
        self, caller: Caller, upstream: Upstream, said: str | None
    ) -> str | None:
        return said

    async def offered(
        self, caller: Caller, upstream: Upstream, method: str, seen: ServerListing
    ) -> VisibleList:
        raise AssertionError("there is no catalogue")

    async def screened(
        self, caller: Caller, upstream: Upstream, method: str, items: Iterable[Any]
    ) -> list[Any]:
        return list(items)

    async def shows_resource(self, caller: Caller, upstream: Upstream, uri: str) -> bool:
        return True

    async def before(self, caller: Caller, request: GuardedRequest) -> RequestPermit | None:
        return None

    async def heard(self, caller: Caller, upstream: Upstream) -> None:
        """Do nothing: nobody asks for it."""


class GuardedExchange:
    """An exchange that is opened only if the guard lets it, and whose result the guard has seen.
    What is said and asked before the result loses what hides."""

    def __init__(
        self, inner: Exchange, guard: Guard, caller: Caller, request: GuardedRequest
    ) -> None:
        self._inner, self._guard = inner, guard
        self._caller, self._request = caller, request
        self.holds = inner.holds
        self._has_heard = False

    @property
    def is_out(self) -> bool:
        return self._inner.is_out

    async def events(self) -> AsyncGenerator[Event]:
        permit = await self._guard.before(self._caller, self._request)
        if permit is not None and permit.answered is not None:
            yield ResultEvent(permit.answered)
            return
        outcome: Outcome | None = None
        try:
            async with aclosing(self._inner.events()) as events:
                async for found in events:
                    if not isinstance(found, WaitEvent):
                        await self._heard()
                    event = clean_event(found)
                    if event is None:
                        continue
                    if permit is not None and isinstance(event, ResultEvent):
                        event = ResultEvent(await permit.result(event.result))
                        outcome = "done"
                    elif isinstance(event, QuestionEvent) and not self.holds:
                        outcome = "asked"
                    yield event
                    outcome = "done" if isinstance(event, ResultEvent) else None
        except RpcError as error:
            outcome = "failed"
            if not isinstance(error, Unreachable):
                await self._heard()
            raise
        except Exception:
            outcome = "failed"
            raise
        finally:
            if permit is not None:
                left: Outcome = "left" if self._inner.is_out else "failed"
                permit.ended(outcome or left)

    async def _heard(self) -> None:
        """Tell the guard once that something came of the server: results, errors, questions and
        notifications alike."""
        if not self._has_heard:
            await self._guard.heard(self._caller, self._request.upstream)
            self._has_heard = True

    async def answer(self, answers: Answers) -> None:
        await self._inner.answer(answers)

    async def cancel(self, reason: str) -> None:
        await self._inner.cancel(reason)


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
