"""The servers behind one endpoint, and what they are together: names, lists, abilities.

One server alone, in the namespace "identity", keeps its names; of several each name begins with its
server's (`names`). One that gives no answer is missing from a list, and the others are there.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from mcp_bridge.caller import Caller
from mcp_bridge.errors import NameRefused
from mcp_bridge.names import IDENTITY, SEPARATOR, SHORTENED, alias_of
from mcp_bridge.pinning import MAX_OFFERED, Kind
from mcp_bridge.protocol.envelope import Envelope
from mcp_bridge.protocol.eras import INTERACTIVE, LISTS, MODERN
from mcp_bridge.protocol.rpc import (
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    RpcError,
)
from mcp_bridge.protocol.translation import server_capabilities
from mcp_bridge.routing.catalog import KIND_OF, Catalog, CurrentListing, FetchedOffer, VisibleList
from mcp_bridge.routing.exchanges import (
    Exchange,
    SessionSource,
    has_next,
    open_exchange,
    pages_of,
    remember_schemas,
    result_of,
    without_misnamed,
)
from mcp_bridge.routing.guard import Guard, GuardedExchange, GuardedRequest, needs_listing
from mcp_bridge.routing.paging import MAX_PAGE, STALE_META, Pages, read_cursor, write_cursor
from mcp_bridge.routing.pruning import Pruner, called
from mcp_bridge.routing.resource_owners import owner_of
from mcp_bridge.routing.sampling import SampledExchange, taken_up
from mcp_bridge.routing.search import CALL, MAX_TOOLS, SEARCH
from mcp_bridge.text_safety.hidden_text import visible
from mcp_bridge.upstream.upstream import ServerDescription, Unreachable, Upstream, as_object
from mcp_bridge.validation.message_shapes import answer_problem, method_answered

log = logging.getLogger(__name__)

NAMED = ("tools/list", "prompts/list")
ASKED_AT_ONCE = 8
"""Servers, for a page of what all have."""
MAX_OFFERED_BYTES = 32 * 1024 * 1024
"""Bounds the offer of one server, all pages together, as JSON."""
NOT_SEEN_YET: dict[str, Any] = {"tools": {}, "prompts": {}, "resources": {}}
"""Capabilities that a server without an answer may turn out to have."""
NEEDS = {"tools/list": "tools", "prompts/list": "prompts"}
"""The capability without which a server is not asked for a list; "resources" for all others."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The servers behind one URL. `key`: what tells it from other endpoints of its tenant."""

    key: str
    upstreams: tuple[Upstream, ...]
    keeps_names: bool
    pruner: Pruner | None = None
    """Set if a catalogue that costs too much is searched instead of listed."""

    def label(self, upstream: Upstream) -> str:
        return IDENTITY if self.keeps_names else upstream.name

    def alias(self, upstream: Upstream, name: str) -> str | None:
        """Return the name that clients see; None: no name can be made of it."""
        try:
            alias = alias_of(self.label(upstream), name)
            own = alias if self.keeps_names else alias.partition(SEPARATOR)[2]
            if own != name:
                upstream.shortened.note(own, name)
        except NameRefused as error:
            log.info("mcp: %s: a name is left out: %s", upstream.name, error)
            return None
        return alias

    def split(self, name: str, what: str) -> tuple[Upstream, str]:
        """Return the server that an alias is of, and what it is called there, perhaps shortened.

        Raises: RpcError.
        """
        if self.keeps_names:
            return self.upstreams[0], name
        label, found, own = name.partition(SEPARATOR)
        for upstream in self.upstreams:
            if found and upstream.name == label:
                return upstream, own
        raise RpcError(INVALID_PARAMS, f"Unknown {what}: {name}")


class ClientContext(msgspec.Struct, frozen=True, kw_only=True):
    """The context of one client's requests: its caller, endpoint, envelope, sessions and guard."""

    caller: Caller
    endpoint: Endpoint
    envelope: Envelope
    sessions: SessionSource
    guard: Guard

    async def described(self, upstream: Upstream) -> ServerDescription:
        """Return a server's description in the era in which the client is served. Raises: RpcError,
        of a server that may not be dialled as of one that gives no answer."""
        return await self._described_to(upstream, self.envelope)

    async def _described_to(self, upstream: Upstream, envelope: Envelope) -> ServerDescription:
        if not await self.guard.may_dial(self.caller, upstream):
            raise Unreachable(upstream.name, "not_approved")
        return await upstream.describe(envelope)

    async def _described_or_not(self, upstream: Upstream) -> ServerDescription | RpcError:
        try:
            return await self.described(upstream)
        except RpcError as error:
            return error

    async def describe(self) -> list[tuple[Upstream, ServerDescription]]:
        """Describe the servers that answer, each asked beside the others: one that hangs is waited
        for once. Raises: RpcError, where none does."""
        upstreams = self.endpoint.upstreams
        answers = await asyncio.gather(*map(self._described_or_not, upstreams))
        found: list[tuple[Upstream, ServerDescription]] = []
        lost: RpcError | None = None
        for upstream, answer in zip(upstreams, answers, strict=True):
            if isinstance(answer, RpcError):
                log.warning("mcp: %s: no answer to what it is: %s", upstream.name, answer.data)
                lost = answer if lost is None or waits_for_sign_in(answer) else lost
            else:
                found.append((upstream, answer))
        if lost is not None and not found:
            raise lost
        return found

    async def capabilities(self, *, legacy: bool) -> tuple[dict[str, Any], str | None]:
        """Return what the servers can, with the instructions of the only server that there is.

        Where none answers a client is let in all the same: lists have what was approved, and a call
        says what is wrong.
        """
        tells = self.guard.catalog is not None
        try:
            found = await self.describe()
        except RpcError:
            return server_capabilities([NOT_SEEN_YET], legacy=legacy, list_changed=tells), None
        offered = [each.capabilities for _, each in found]
        can = server_capabilities(offered, legacy=legacy, list_changed=tells)
        if len(found) != 1:
            return can, None
        upstream, described = found[0]
        text = described.instructions
        return can, await self.guard.shown_instructions(self.caller, upstream, text)

    async def request(
        self, upstream: Upstream, method: str, params: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the result of a request during which the server may not ask anything. Raises:
        RpcError."""
        return await self._request(await self.described(upstream), upstream, method, params)

    async def _request(
        self, described: ServerDescription, upstream: Upstream, method: str, params: dict[str, Any]
    ) -> dict[str, Any]:
        exchange = open_exchange(
            upstream,
            modern=described.modern,
            sessions=self.sessions,
            envelope=self.envelope,
            method=method,
            params=params,
        )
        result = await result_of(exchange)
        if method == "tools/list":
            result = without_misnamed(upstream, result) if described.modern else result
            remember_schemas(upstream, result)
        return result

    async def list(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Return a page of a list. Raises: RpcError."""
        page = await self._listed(method, params)
        pruner = self.endpoint.pruner
        if method != "tools/list" or pruner is None or params.get("cursor") is not None:
            return page
        return pruner.pruned(page, await self._all_tools(page))

    async def _all_tools(self, page: dict[str, Any]) -> Sequence[Any]:
        """Return the tools of `page`, the first, and of those behind it."""
        items = [*page["tools"]]
        while isinstance(cursor := page.get("nextCursor"), str) and len(items) < MAX_TOOLS:
            page = await self._listed("tools/list", {"cursor": cursor})
            items += page["tools"]
        return items

    async def meant(
        self, method: str, params: dict[str, Any]
    ) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """Handle a call of the search and call meta-tools: return the search result, or the
        parameters of the tool to call. Raises: RpcError."""
        pruner, name = self.endpoint.pruner, params.get("name")
        if pruner is None or method != "tools/call" or name not in (SEARCH, CALL):
            return None, params
        if name == CALL:
            return None, called(params)
        items = await self._all_tools(await self._listed("tools/list", {}))
        return await pruner.search(self.caller, items, params.get("arguments")), params

    async def _listed(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if not self.endpoint.keeps_names:
            return await self._of_several(method, params)
        upstream = self.endpoint.upstreams[0]
        cursor = params.get("cursor")
        shown = await self._shown(upstream, method, cursor)
        if shown is not None:
            return shown
        try:
            page = await self.request(upstream, method, params)
        except Unreachable as error:
            if method in NAMED or cursor is not None:
                raise
            return missing_of(upstream, method, error)
        return await self._passed_on(upstream, method, page)

    async def _of_several(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Return a page with the lists of the next servers, as many as fit. They are asked at once,
        and one that does not answer is missing. Raises: RpcError."""
        index, cursor = read_cursor(params.get("cursor"))
        given = {name: value for name, value in params.items() if name != "cursor"}
        pages = Pages(LISTS[method])
        while asked := self.endpoint.upstreams[index : index + ASKED_AT_ONCE]:
            first, *others = asked
            work = [self._page_or_none(first, method, given, cursor)]
            work += [self._page_or_none(each, method, given, None) for each in others]
            for answer in await asyncio.gather(*work, return_exceptions=True):
                if isinstance(answer, BaseException):
                    raise answer
                after = answer.pop("nextCursor", None)
                if not pages.take(answer):
                    return pages.joined(write_cursor(index, None))
                if isinstance(after, str):
                    return pages.joined(write_cursor(index, after))
                index += 1
            cursor = None
        return pages.joined(None)

    async def _page_or_none(
        self, upstream: Upstream, method: str, params: dict[str, Any], cursor: str | None
    ) -> dict[str, Any]:
        try:
            return await self._page(upstream, method, params, cursor)
        except Unreachable as error:
            return missing_of(upstream, method, error)

    async def _page(
        self, upstream: Upstream, method: str, params: dict[str, Any], cursor: str | None
    ) -> dict[str, Any]:
        shown = await self._shown(upstream, method, cursor)
        if shown is not None:
            return shown
        described = await self.described(upstream)
        if NEEDS.get(method, "resources") not in described.capabilities:
            return {LISTS[method]: []}
        if cursor is not None:
            params = {**params, "cursor": cursor}
        return await self._passed_on(upstream, method, await self.request(upstream, method, params))

    async def _shown(
        self, upstream: Upstream, method: str, cursor: str | None
    ) -> dict[str, Any] | None:
        """Return a page of the approved items in JSON, which begins behind the name `cursor`; None:
        the list is the server's own. Raises: RpcError."""
        if self.guard.catalog is None or method not in KIND_OF:
            return None
        shown = VisibleList((), stale=False)
        if await self.guard.may_dial(self.caller, upstream):
            current = await self._listing(self.guard.catalog, upstream)
            shown = await self.guard.shown_list(self.caller, upstream, method, current.seen)
        first, pins = 0, shown.pins
        if cursor is not None:
            first = bisect_right(pins, str(cursor), key=lambda pin: pin.name)
        end = first + MAX_PAGE
        alias_of = partial(self.endpoint.alias, upstream)
        items = shown.written(self.endpoint.label(upstream), alias_of, first, end)
        page: dict[str, Any] = {LISTS[method]: items}
        if len(pins) > end:
            page["nextCursor"] = pins[end - 1].name
        if shown.stale:
            page["_meta"] = {STALE_META: [upstream.name]}
        return page

    async def _passed_on(
        self, upstream: Upstream, method: str, page: dict[str, Any]
    ) -> dict[str, Any]:
        items = as_list(page.get(LISTS[method]))
        shown = await self.guard.shown_items(self.caller, upstream, method, items)
        return self._renamed(upstream, method, {**page, LISTS[method]: shown})

    async def list_digests(self, upstream: Upstream, *, passes_on: bool) -> Mapping[str, bytes]:
        """Return a digest of what the caller is shown of each list of a server, by the
        notification that says that the list changed. `passes_on`: as `Catalog.current` has it.
        Raises: RpcError."""
        catalog = self.guard.catalog
        if catalog is None or not await self.guard.may_dial(self.caller, upstream):
            return {}
        current = await self._listing(catalog, upstream, passes_on=passes_on)
        return await self.guard.list_digests(self.caller, upstream, current.seen)

    async def _listing(
        self, catalog: Catalog, upstream: Upstream, *, passes_on: bool = True
    ) -> CurrentListing:
        org_id = self.caller.org_id
        return await catalog.current(org_id, upstream, self.fetch, passes_on=passes_on)

    async def fetch(self, upstream: Upstream) -> FetchedOffer:
        """Ask a server for everything that is pinned of it, in the newer era where it speaks that:
        what is approved is the same for all clients. Raises: RpcError."""
        newer = msgspec.structs.replace(self.envelope, version=MODERN)
        described = await self._described_to(upstream, newer)
        if not described.modern:
            await self.sessions.get(upstream)  # one that begins now is not another change
        generation = upstream.generation
        things: list[tuple[Kind, object]] = []
        size_bytes, digest = 0, hashlib.sha256()
        for method in NAMED:
            if NEEDS[method] not in described.capabilities:
                continue
            async for page in pages_of(partial(self._request, described, upstream, method)):
                found = page.get(LISTS[method])
                things += [(KIND_OF[method], each) for each in as_list(found)]
                encoded = msgspec.json.encode(found)
                digest.update(b"%b %b\n" % (method.encode(), encoded))
                size_bytes += len(encoded)
                if len(things) > MAX_OFFERED or size_bytes > MAX_OFFERED_BYTES:
                    raise Unreachable(upstream.name, "too_much")
            if has_next(page):
                raise Unreachable(upstream.name, "too_much")
        if described.instructions is not None:
            things.append(("instructions", described.instructions))
        digest.update(msgspec.json.encode(described.instructions))
        return FetchedOffer(tuple(things), generation, digest.digest())

    async def open(
        self,
        upstream: Upstream,
        method: str,
        params: dict[str, Any],
        *,
        alias: str,
        continues: str | None = None,
    ) -> Exchange:
        """Open the exchange of a client's request. `params`: those for the server. `continues`: the
        state that proves that the request went out before. Raises: RpcError."""
        check_answers(as_object(params.get("inputResponses")))
        described = await self.described(upstream)
        is_sampled = upstream.config.sampling == "engine" and method in INTERACTIVE
        sent, before = taken_up(params) if is_sampled else (params, None)
        exchange = open_exchange(
            upstream,
            modern=described.modern,
            sessions=self.sessions,
            envelope=self.envelope,
            method=method,
            params=sent,
        )
        if is_sampled:
            exchange = SampledExchange(exchange, upstream, self.caller, before)
        catalog = self.guard.catalog if needs_listing(method, params) else None
        current = None if catalog is None else await self._listing(catalog, upstream)
        request = GuardedRequest(
            upstream=upstream,
            alias=alias,
            method=method,
            params=params,
            continues=continues,
            seen=None if current is None else current.seen,
            offer_age_s=None if current is None else current.age_s,
            is_modern=described.modern,
        )
        return GuardedExchange(exchange, self.guard, self.caller, request)

    def _renamed(self, upstream: Upstream, method: str, page: dict[str, Any]) -> dict[str, Any]:
        """Rename the things of a page; entries without a name are dropped."""
        if method not in NAMED:
            return {**page, LISTS[method]: as_list(page.get(LISTS[method]))}
        found = [each for each in as_list(page.get(LISTS[method])) if isinstance(each, dict)]
        named = [each for each in found if isinstance(each.get("name"), str)]
        for each in named:  # all, before any is shown: of two that are one neither is
            self.endpoint.alias(upstream, each["name"])
        items = []
        for each in named:
            alias = self.endpoint.alias(upstream, each["name"])
            if alias is not None:
                items.append(each if alias == each["name"] else {**each, "name": alias})
        return {**page, LISTS[method]: items}

    async def _own_name(self, method: str, alias: str) -> tuple[Upstream, str]:
        """Return the server and its own name for an alias that lists show; any other alias is
        unknown. Raises: RpcError."""
        what = "tool" if method == "tools/list" else "prompt"
        upstream, own = self.endpoint.split(alias, what)
        found = await self._unshortened(upstream, method, own) if SHORTENED.fullmatch(own) else own
        if found is None or self.endpoint.alias(upstream, found) != alias:
            raise RpcError(INVALID_PARAMS, f"Unknown {what}: {alias}")
        return upstream, found

    async def _unshortened(self, upstream: Upstream, method: str, own: str) -> str | None:
        """Return the original of a shortened name, if the server lists it. Raises: RpcError."""
        known = upstream.shortened.get(own)
        if known is None:
            async for page in pages_of(partial(self.request, upstream, method)):
                self._renamed(upstream, method, page)
                if (known := upstream.shortened.get(own)) is not None:
                    break
        return known

    async def target(self, method: str, params: dict[str, Any]) -> tuple[Upstream, dict[str, Any]]:
        """Return the server that a request is for, and the request's parameters as they are there.

        Raises: RpcError.
        """
        endpoint = self.endpoint
        if not endpoint.upstreams:
            raise RpcError(METHOD_NOT_FOUND, "Method not found", method)
        if method in ("tools/call", "prompts/get"):
            lists = "tools/list" if method == "tools/call" else "prompts/list"
            upstream, name = await self._own_name(lists, str(params.get("name")))
            return upstream, {**params, "name": name}
        reference = as_object(params.get("ref"))
        if method == "completion/complete" and reference.get("type") == "ref/prompt":
            upstream, name = await self._own_name("prompts/list", str(reference.get("name")))
            return upstream, {**params, "ref": {**reference, "name": name}}
        uri = params.get("uri", reference.get("uri"))
        return await self.owner(uri, is_read=method == "resources/read"), params

    async def owner(self, uri: object, *, is_read: bool = False) -> Upstream:
        """Return the server that has a resource, or a template as it is listed.

        `is_read`: now, so that it may be one that nobody lists. Raises: RpcError.
        """
        if not self.endpoint.upstreams:
            raise RpcError(METHOD_NOT_FOUND, "There are no servers")
        if self.endpoint.keeps_names:
            return self.endpoint.upstreams[0]

        async def may_read(upstream: Upstream) -> bool:
            return await self.guard.shows_resource(self.caller, upstream, str(uri))

        upstreams = await self._with_resources()
        return await owner_of(uri, upstreams, self.request, may_read if is_read else None)

    async def _with_resources(self) -> tuple[Upstream, ...]:
        """Return the servers with resources, and those that had some when they last answered: what
        was theirs stays theirs. Raises: RpcError, where there is none and one gave no answer."""
        found: tuple[Upstream, ...] = ()
        lost: RpcError | None = None
        for upstream in self.endpoint.upstreams:
            try:
                if "resources" in (await self.described(upstream)).capabilities:
                    found += (upstream,)
            except RpcError as error:
                lost = error
                if upstream.known_claims is not None and await self.guard.may_dial(
                    self.caller, upstream
                ):
                    found += (upstream,)
        if lost is not None and not found:
            raise lost
        return found


def check_answers(answers: Mapping[str, Any]) -> None:
    """Raises: RpcError, for an answer of the client that the protocol does not have."""
    for key, answer in answers.items():
        wrong = answer_problem(method_answered(answer), answer)
        if wrong is not None:
            where = f"inputResponses/{key}{wrong.path}"
            raise RpcError(INVALID_PARAMS, f"{visible(where)}: {wrong.message}")


def missing_of(upstream: Upstream, method: str, error: RpcError) -> dict[str, Any]:
    """Return the marked page of a server that does not answer."""
    log.warning("mcp: %s: %s is missing: %s", upstream.name, method, error.data)
    return {LISTS[method]: [], "_meta": {STALE_META: [upstream.name]}}


def waits_for_sign_in(error: RpcError) -> bool:
    return isinstance(error, Unreachable) and error.sign_in_url is not None


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
