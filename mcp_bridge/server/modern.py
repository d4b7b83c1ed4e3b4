"""Requests of 2026-07-28, from a client that keeps nothing here.

What a server wants of the client goes out as `input_required`, with a sealed `requestState`. A
server of the newer era is done with the request by then, and its own state travels in ours: any
worker goes on. One of the older era waits, and so does the call here, in the worker that holds it:
others find it by what the state says.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from foundation.periodic import Periodic
from foundation.tasks import TaskSet, end_tasks
from mcp_bridge.caller import Caller
from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.allowed_fields import from_server_notification
from mcp_bridge.protocol.continuation import (
    CALL_S,
    Continuation,
    QuestionCount,
    Sealer,
    invalid_state,
    request_digest,
    took_too_long,
)
from mcp_bridge.protocol.envelope import Envelope, check_param_headers
from mcp_bridge.protocol.eras import (
    FORWARDED,
    INTERACTIVE,
    LISTS,
    MODERN,
    SUBSCRIPTION_META,
    check_request,
    is_at_least,
)
from mcp_bridge.protocol.questions import ELICIT
from mcp_bridge.protocol.rpc import (
    INTERNAL_ERROR,
    METHOD_NOT_FOUND,
    URL_NEEDED,
    Message,
    RpcError,
)
from mcp_bridge.protocol.translation import to_input_required, to_modern_error, to_modern_result
from mcp_bridge.routing.endpoint import ClientContext, Endpoint
from mcp_bridge.routing.exchanges import (
    Answers,
    Event,
    Exchange,
    NotificationEvent,
    QuestionEvent,
    ResultEvent,
    tool_schema,
)
from mcp_bridge.routing.guard import Guard
from mcp_bridge.routing.sessions import PrincipalSessionSource, Sessions
from mcp_bridge.server.list_watch import Watches
from mcp_bridge.server.subscribe import listen
from mcp_bridge.upstream.upstream import Upstream, as_object
from mcp_bridge.worker_relay import Emit, OwnerGone, Payload, Relay

log = logging.getLogger(__name__)

MAX_HELD = 1024  # calls per worker that wait for a client's answer
MAX_HELD_OF_ORG = 256
MAX_HELD_OF_ONE = 32
"""Held calls of one tenant, and of one principal."""
SWEEP_S = 15.0
GATHER_S = 0.02
"""How long further questions of a server are awaited, so that they go out together."""
RESUME = "resume"


class ClientRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request: who asks, for what, and how it looks to them."""

    caller: Caller
    endpoint: Endpoint
    envelope: Envelope
    method: str
    params: dict[str, Any]
    count: QuestionCount
    """Counts how often its client was asked something for it."""

    @property
    def digest(self) -> bytes:
        return request_digest(self.endpoint.key, self.method, self.params)


class OpenExchange:
    """An exchange at a server, whose next event can be waited for beside something else."""

    def __init__(self, server: str, exchange: Exchange) -> None:
        self.server, self.inner = server, exchange
        self._events = exchange.events()
        self._coming: asyncio.Task[Event] | None = None

    async def next(self) -> Event:
        if self._coming is None:
            return await anext(self._events)
        event = await self._coming
        self._coming = None
        return event

    async def comes_by(self, until: float) -> bool:
        """Wait until `until` (monotonic), and return whether the next event is there: what else a
        server asks at once comes at once."""
        if self._coming is None:
            self._coming = asyncio.create_task(next_of(self._events))
        left_s = until - time.monotonic()
        if left_s > 0:
            await asyncio.wait({self._coming}, timeout=left_s)
        return left_s > 0 and self._coming.done()

    async def stop(self) -> None:
        """Stop the events: who waits for the next one is done before the source is closed."""
        if self._coming is not None:
            await end_tasks(self._coming)
        await self._events.aclose()

    async def end(self, reason: str) -> None:
        await self.inner.cancel(reason)
        await self.stop()


class HeldCall(msgspec.Struct, kw_only=True):
    """A call that waits for its client, open at a server."""

    request: ClientRequest
    exchange: OpenExchange
    requests: dict[str, Message]
    answers: Answers
    expires_at: float


class ModernProtocol:
    def __init__(
        self,
        sessions: Sessions,
        relay: Relay,
        sealer: Sealer,
        info: dict[str, Any],
        guard: Guard,
        watches: Watches,
    ) -> None:
        self._watches = watches
        self._sessions, self._relay, self._sealer = sessions, relay, sealer
        self._info, self._guard = info, guard
        self._held: dict[str, HeldCall] = {}
        self._ending = TaskSet()
        self._drains = asyncio.Event()
        self._sweeping = Periodic(
            "sweep held calls",
            SWEEP_S,
            self._sweep,
            log=log,
            failure="mcp: calls whose client is gone are not ended",
            at_once=False,
        )
        relay.servers[RESUME] = self._resume_for_another

    def start(self) -> None:
        self._sweeping.start()

    def begin_drain(self) -> None:
        self._drains.set()

    async def close(self) -> None:
        await self._sweeping.close()
        for held in list(self._held.values()):
            await held.exchange.end("the gateway stops")
        self._held.clear()
        await self._ending.wait()

    async def _sweep(self) -> None:
        for key, held in list(self._held.items()):
            if held.expires_at < time.time() and self._held.pop(key, None) is not None:
                await held.exchange.end("nobody answered in time")

    async def answer(
        self,
        caller: Caller,
        endpoint: Endpoint,
        envelope: Envelope,
        message: Message,
        headers: list[tuple[str, str]],
        emit: Emit,
    ) -> dict[str, Any]:
        """Return the result of a request; messages before it go to `emit`. Raises: RpcError."""
        method, params = message["method"], rpc.params_of(message)
        check_request(method, MODERN, params)
        context = self.context(caller, endpoint, envelope)
        request = ClientRequest(
            caller=caller,
            endpoint=endpoint,
            envelope=envelope,
            method=method,
            params=params,
            count=QuestionCount(began_at=time.time()),
        )
        try:
            if method == "server/discover":
                return await self._discover(context)
            if method == "subscriptions/listen":
                await listen(context, message["id"], params, emit, self._drains, self._watches)
                meta = {SUBSCRIPTION_META: message["id"]}
                return to_modern_result(method, {"_meta": meta}, self._info)
            async with asyncio.timeout(CALL_S):
                if method in LISTS:
                    page = await context.list(method, params)
                    return to_modern_result(method, page, self._info)
                if method not in FORWARDED:
                    raise RpcError(METHOD_NOT_FOUND, "Method not found", method)
                return await self._forward(request, context, headers, emit)
        except RpcError as error:
            if error.code == URL_NEEDED and method in INTERACTIVE:
                return self._asked_to_open(params, error)
            raise to_modern_error(method, params, error) from None
        except TimeoutError:
            raise took_too_long() from None

    def _asked_to_open(self, params: dict[str, Any], error: RpcError) -> dict[str, Any]:
        """Return the result that has a client open the URLs that a server of the older era wants
        opened before it is called again; the client is asked once. Raises: RpcError."""
        if "inputResponses" in params:
            raise RpcError(INTERNAL_ERROR, error.message)
        wanted = enumerate(error.data["elicitations"], 1)
        requests = {f"url-{n}": {"method": ELICIT, "params": each} for n, each in wanted}
        return to_input_required(requests, None, self._info)

    def context(self, caller: Caller, endpoint: Endpoint, envelope: Envelope) -> ClientContext:
        sessions = PrincipalSessionSource(self._sessions, caller, envelope)
        return ClientContext(
            caller=caller,
            endpoint=endpoint,
            envelope=envelope,
            sessions=sessions,
            guard=self._guard,
        )

    async def _discover(self, context: ClientContext) -> dict[str, Any]:
        capabilities, instructions = await context.capabilities(legacy=False)
        found: dict[str, Any] = {"supportedVersions": [MODERN], "capabilities": capabilities}
        if instructions is not None:
            found["instructions"] = instructions
        return to_modern_result("server/discover", found, self._info)

    async def _forward(
        self,
        request: ClientRequest,
        context: ClientContext,
        headers: list[tuple[str, str]],
        emit: Emit,
    ) -> dict[str, Any]:
        found, asked = await context.meant(request.method, request.params)
        if found is not None:
            return to_modern_result(request.method, found, self._info)
        upstream, params = await context.target(request.method, asked)
        described = await context.described(upstream)
        if request.method == "tools/call" and asked is request.params:
            await self._check_headers(context, upstream, described.modern, params, headers)
        state, proven = request.params.get("requestState"), None
        if request.method in INTERACTIVE and state is not None:
            kept = self._sealer.unseal(state, request.caller.principal, request.digest, time.time())
            if kept.call is not None:
                return await self._resume(request, kept, emit)
            if not described.modern or kept.server != upstream.name:
                raise invalid_state()
            params = {name: value for name, value in params.items() if name != "requestState"}
            if kept.state is not None:
                params["requestState"] = kept.state
            proven = str(state)
            request = msgspec.structs.replace(request, count=kept.count or request.count)
        alias = str(asked.get("name"))
        exchange = await context.open(
            upstream, request.method, params, alias=alias, continues=proven
        )
        return await self._drive_in_time(request, OpenExchange(upstream.name, exchange), emit)

    async def _check_headers(
        self,
        context: ClientContext,
        upstream: Upstream,
        modern: bool,
        params: dict[str, Any],
        headers: list[tuple[str, str]],
    ) -> None:
        """Check the headers that say what arguments do.

        Where nothing can be wrong, nothing is looked up.
        """
        arguments = as_object(params.get("arguments"))
        if not arguments and not any(name.startswith("mcp-param-") for name, _ in headers):
            return
        sessions = None if modern else context.sessions
        schema = await tool_schema(
            upstream, str(params.get("name")), context.envelope, sessions=sessions
        )
        if schema is not None:
            check_param_headers(schema, arguments, headers)

    async def _drive_in_time(
        self, request: ClientRequest, exchange: OpenExchange, emit: Emit
    ) -> dict[str, Any]:
        """Drive an exchange within the time of its call, rounds before this one included."""
        try:
            async with asyncio.timeout(max(0.0, request.count.ends_at - time.time())):
                return await self._drive(request, exchange, emit)
        except TimeoutError:
            raise took_too_long() from None

    async def _drive(
        self, request: ClientRequest, exchange: OpenExchange, emit: Emit
    ) -> dict[str, Any]:
        """Drive an exchange until the result, or until the client is to answer.

        Raises: RpcError.
        """
        is_held, until = False, 0.0
        requests: dict[str, Message] = {}
        try:
            while not requests or await exchange.comes_by(until):
                event = await exchange.next()
                if isinstance(event, NotificationEvent):
                    await self._note(request.envelope, event.message, emit)
                elif isinstance(event, ResultEvent):
                    return to_modern_result(request.method, event.result, self._info)
                elif isinstance(event, QuestionEvent) and not exchange.inner.holds:
                    return self._ask(request, exchange, event)
                elif isinstance(event, QuestionEvent):
                    until = until or time.monotonic() + GATHER_S
                    requests |= event.requests
            try:
                result = self._ask(request, exchange, QuestionEvent(requests))
            except RpcError as error:
                self._ending.spawn(exchange.end(error.message))
                raise
            finally:
                is_held = True
            return result
        except asyncio.CancelledError:
            is_held = True  # by the task that cancels it
            self._ending.spawn(exchange.end("the client left"))
            raise
        finally:
            if not is_held:
                await exchange.stop()

    async def _note(self, envelope: Envelope, message: Message, emit: Emit) -> None:
        """Send what belongs to this request, and its log as far as it was asked for."""
        method = message["method"]
        if method == "notifications/message":
            level = rpc.params_of(message).get("level")
            if envelope.level is None or not is_at_least(level, envelope.level):
                return
        elif method != "notifications/progress":
            return
        told = from_server_notification(message, legacy=False)
        if told is not None:
            await emit(told)

    def _ask(
        self, request: ClientRequest, exchange: OpenExchange, asked: QuestionEvent
    ) -> dict[str, Any]:
        """Return the result that asks the client. Raises: RpcError."""
        count = request.count.after(len(asked.requests), exchange.server)
        request = msgspec.structs.replace(request, count=count)
        expires_at = count.answer_by(time.time())
        if not exchange.inner.holds:
            continuation = Continuation(
                server=exchange.server,
                expires_at=expires_at,
                state=asked.state,
                asked=tuple(asked.requests),
                count=count,
            )
            return self._input_required(request, asked.requests, continuation)
        if not self._has_place_for(request.caller):
            raise RpcError(INTERNAL_ERROR, "Too many calls wait for answers", status=429)
        return self._hold(
            HeldCall(
                request=request,
                exchange=exchange,
                requests=asked.requests,
                answers={},
                expires_at=expires_at,
            )
        )

    def _has_place_for(self, caller: Caller) -> bool:
        waiting = [each.request.caller for each in self._held.values()]
        of_org = sum(each.org_id == caller.org_id for each in waiting)
        of_one = sum(each.principal == caller.principal for each in waiting)
        return len(waiting) < MAX_HELD and of_org < MAX_HELD_OF_ORG and of_one < MAX_HELD_OF_ONE

    def _hold(self, held: HeldCall) -> dict[str, Any]:
        key = secrets.token_hex(16)
        self._held[key] = held
        wanted = {name: each for name, each in held.requests.items() if name not in held.answers}
        continuation = Continuation(
            server=held.exchange.server,
            expires_at=held.expires_at,
            worker=self._relay.worker,
            call=key,
            asked=tuple(wanted),
        )
        return self._input_required(held.request, wanted, continuation)

    def _input_required(
        self, request: ClientRequest, requests: dict[str, Message], continuation: Continuation
    ) -> dict[str, Any]:
        sealed = self._sealer.seal(continuation, request.caller.principal, request.digest)
        return to_input_required(requests, sealed, self._info)

    # A call that waits.

    async def _resume(
        self, request: ClientRequest, found: Continuation, emit: Emit
    ) -> dict[str, Any]:
        assert found.call is not None and found.worker is not None
        given = as_object(request.params.get("inputResponses"))
        answers: Answers = {key: {"result": given[key]} for key in found.asked if key in given}
        if found.worker == self._relay.worker:
            return await self._go_on(found.call, request.caller.principal, answers, emit)
        return await self._relay.ask(
            found.worker,
            RESUME,
            emit,
            call=found.call,
            principal=request.caller.principal,
            answers=answers,
        )

    async def _resume_for_another(self, payload: Payload, emit: Emit) -> dict[str, Any]:
        return await self._go_on(payload["call"], payload["principal"], payload["answers"], emit)

    async def _go_on(
        self, key: str, principal: str, answers: Answers, emit: Emit
    ) -> dict[str, Any]:
        """Go on with a held call, once: whoever comes second with the same state finds nothing.

        Raises: RpcError.
        """
        held = self._held.get(key)
        if held is None or held.request.caller.principal != principal:
            raise OwnerGone
        del self._held[key]
        held.answers |= answers
        if any(name not in held.answers for name in held.requests):
            return self._hold(held)
        try:
            await held.exchange.inner.answer(held.answers)
        except (RpcError, asyncio.CancelledError) as error:
            left = isinstance(error, asyncio.CancelledError)
            said = "the client left" if left else "the answer could not be given"
            self._ending.spawn(held.exchange.end(said))
            raise
        return await self._drive_in_time(held.request, held.exchange, emit)


async def next_of(events: AsyncGenerator[Event]) -> Event:
    return await anext(events)
