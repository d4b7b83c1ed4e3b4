"""What stands between clients and servers, as the protocol sees it: which of a server's offer is
shown, and whether a request goes out.

One object is injected; `LetsAllPass` is that of a bridge without trust, `trust.Trust` the real one.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any, Literal, Protocol

import msgspec

from mcp_bridge.caller import Caller
from mcp_bridge.pinning import Kind, Pin
from mcp_bridge.protocol.rpc import RpcError
from mcp_bridge.provenance import clean_message, clean_requests
from mcp_bridge.routing.exchanges import Answers, Asked, Done, Event, Exchange, Noted, Waiting
from mcp_bridge.upstream.upstream import Unreachable, Upstream

Outcome = Literal["done", "asked", "failed", "left"]
"""Of a request that went out. `asked`: the client is to answer something first, and then asks
again; `left`: nobody waited for the end."""

KIND_OF: Mapping[str, Kind] = {
    "tools/list": "tool",
    "tools/call": "tool",
    "prompts/list": "prompt",
    "prompts/get": "prompt",
}
"""The methods that are about what is pinned."""


class Fetched(msgspec.Struct, frozen=True):
    """Everything of a server that is pinned, as it offers it now. `generation`: the server's
    (`Upstream.generation`) when it was asked. `digest`: SHA-256; of other things it is another."""

    things: tuple[tuple[Kind, object], ...]
    generation: int
    digest: bytes


class Source(Protocol):
    """How somebody's requests get to a server."""

    @property
    def caller(self) -> Caller: ...

    async def fetch(self, upstream: Upstream) -> Fetched:
        """Raises: RpcError."""
        ...


class Shown:
    """What clients see of one list: `pins`, ordered by the server's own names. `stale`: the server
    does not answer, and what was approved of it stands in. Never changes: another list is another
    Shown, so what is written of it is kept with it."""

    def __init__(self, pins: tuple[Pin, ...], *, stale: bool) -> None:
        self.pins, self.stale = pins, stale
        self.views: dict[tuple[str, ...], Shown] = {}
        """Of it what somebody is shown (`views`)."""
        self._digest: bytes | None = None
        self._written: dict[str, dict[str, msgspec.Raw | None]] = {}

    @property
    def digest(self) -> bytes:
        """SHA-256; of other things it is another."""
        if self._digest is None:
            said = "\n".join(pin.digest for pin in self.pins)
            self._digest = hashlib.sha256(said.encode()).digest()
        return self._digest

    def without_others(self, pins: tuple[Pin, ...]) -> Shown:
        """Of its own some."""
        found = Shown(pins, stale=self.stale)
        found._written = self._written
        return found

    def written(
        self, label: str, alias_of: Callable[[str], str | None], first: int, end: int
    ) -> list[msgspec.Raw]:
        """The pins from `first` to before `end` as JSON, each by its alias, without those that have
        none. `label`: what the aliases begin with, which is all that tells them apart, and a server
        has two. A page at a time: nobody waits for twenty thousand."""
        kept = self._written.setdefault(label, {})
        asked = self.pins[first:end]
        new = [pin for pin in asked if pin.name not in kept]
        for pin in new:  # all, before any is written: of two that are one neither is
            alias_of(pin.name)
        for pin in new:
            kept[pin.name] = written(pin, alias_of(pin.name))
        return [found for pin in asked if (found := kept[pin.name]) is not None]


def written(pin: Pin, alias: str | None) -> msgspec.Raw | None:
    if alias is None or alias == pin.name:
        return None if alias is None else msgspec.Raw(pin.body)
    value = pin.value()
    assert isinstance(value, dict)
    return msgspec.Raw(msgspec.json.encode({**value, "name": alias}))


class Asking(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it would go out. `alias`: what its tool or prompt is called in front of us.
    `continues`: the client's state says that it went out before, and what proves that."""

    upstream: Upstream
    alias: str
    method: str
    params: Mapping[str, Any]
    continues: str | None = None


class Passage(Protocol):
    """One request that may go out."""

    @property
    def answered(self) -> dict[str, Any] | None:
        """The result, where nothing goes out after all."""
        ...

    async def result(self, result: dict[str, Any]) -> dict[str, Any]:
        """What the client gets of what the server said. Raises: RpcError."""
        ...

    def ended(self, outcome: Outcome) -> None:
        """Once, whatever became of it."""
        ...


class Answered(msgspec.Struct, frozen=True):
    """A Passage of a call that does not go out: its result is known."""

    answered: dict[str, Any]

    async def result(self, result: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError("nothing went out")

    def ended(self, outcome: Outcome) -> None:
        """Nothing began."""


class Guard(Protocol):
    @property
    def holds_back(self) -> bool:
        """Whether lists may change though no server says so."""
        ...

    def watched_by(self, noticed: Callable[[str, Upstream], None]) -> None:
        """`noticed`: called with an org's id and its server whose offer was found to be another,
        so that a list of it is."""
        ...

    async def shows(
        self, source: Source, upstream: Upstream, *, passes_on: bool
    ) -> Mapping[str, bytes]:
        """Of each list of a server, by the notification that says that it changed, a digest of
        what somebody is shown of it. `passes_on`: whether others are told of another offer that is
        found so. Raises: RpcError."""
        ...

    async def opens(self, caller: Caller, upstream: Upstream) -> bool:
        """Whether this server may be dialled at all."""
        ...

    async def instructions(
        self, caller: Caller, upstream: Upstream, said: str | None
    ) -> str | None: ...

    async def offered(self, source: Source, upstream: Upstream, method: str) -> Shown | None:
        """None: page by page, as the server says. Raises: RpcError."""
        ...

    async def screened(
        self, caller: Caller, upstream: Upstream, method: str, items: Iterable[Any]
    ) -> list[Any]:
        """Of a page of what is not pinned."""
        ...

    async def shows_resource(self, caller: Caller, upstream: Upstream, uri: str) -> bool:
        """Whether somebody may be told that it is there."""
        ...

    async def before(self, source: Source, asking: Asking) -> Passage | None:
        """None: there is nothing to say of such a request. Raises: RpcError, if it is not to go
        out."""
        ...

    async def heard(self, caller: Caller, upstream: Upstream) -> None:
        """Before somebody is told what a server says of its own."""
        ...


class LetsAllPass:
    holds_back = False

    def watched_by(self, noticed: Callable[[str, Upstream], None]) -> None:
        """There is nothing that it would notice."""

    async def shows(
        self, source: Source, upstream: Upstream, *, passes_on: bool
    ) -> Mapping[str, bytes]:
        return {}

    async def opens(self, caller: Caller, upstream: Upstream) -> bool:
        return True

    async def instructions(
        self, caller: Caller, upstream: Upstream, said: str | None
    ) -> str | None:
        return said

    async def offered(self, source: Source, upstream: Upstream, method: str) -> Shown | None:
        return None

    async def screened(
        self, caller: Caller, upstream: Upstream, method: str, items: Iterable[Any]
    ) -> list[Any]:
        return list(items)

    async def shows_resource(self, caller: Caller, upstream: Upstream, uri: str) -> bool:
        return True

    async def before(self, source: Source, asking: Asking) -> Passage | None:
        return None

    async def heard(self, caller: Caller, upstream: Upstream) -> None:
        """It matters to nobody."""


class GuardedExchange:
    """An exchange that is opened only if the guard lets it, and whose result the guard has seen.
    What is said and asked before the result loses what hides."""

    def __init__(self, inner: Exchange, guard: Guard, source: Source, asking: Asking) -> None:
        self._inner, self._guard = inner, guard
        self._source, self._asking = source, asking
        self.holds = inner.holds
        self._has_heard = False

    @property
    def is_out(self) -> bool:
        return self._inner.is_out

    async def events(self) -> AsyncGenerator[Event]:
        passage = await self._guard.before(self._source, self._asking)
        if passage is not None and passage.answered is not None:
            yield Done(passage.answered)
            return
        outcome: Outcome | None = None
        try:
            async with aclosing(self._inner.events()) as events:
                async for found in events:
                    if not isinstance(found, Waiting):
                        await self._heard()
                    event = clean_event(found)
                    if event is None:
                        continue
                    if passage is not None and isinstance(event, Done):
                        event = Done(await passage.result(event.result))
                        outcome = "done"
                    elif isinstance(event, Asked) and not self.holds:
                        outcome = "asked"
                    yield event
                    outcome = "done" if isinstance(event, Done) else None
        except RpcError as error:
            outcome = "failed"
            if not isinstance(error, Unreachable):
                await self._heard()
            raise
        except Exception:
            outcome = "failed"
            raise
        finally:
            if passage is not None:
                left: Outcome = "left" if self._inner.is_out else "failed"
                passage.ended(outcome or left)

    async def _heard(self) -> None:
        """Results, errors, questions and notifications alike."""
        if not self._has_heard:
            await self._guard.heard(self._source.caller, self._asking.upstream)
            self._has_heard = True

    async def answer(self, answers: Answers) -> None:
        await self._inner.answer(answers)

    async def cancel(self, reason: str) -> None:
        await self._inner.cancel(reason)


def clean_event(event: Event) -> Event | None:
    """None: nothing to pass on. Raises: RpcError, for a question that cannot be asked."""
    if isinstance(event, Noted):
        message = clean_message(event.message)
        return None if message is None else Noted(message)
    if isinstance(event, Asked):
        return Asked(clean_requests(event.requests), event.state)
    return event
