"""Limits and bills calls of MCP servers, each as a request of its own. A call is admitted by its
caller's limits as a request that writes nothing; it is written with its price before it goes out,
and on disk before anybody is told the result. So a gateway that is killed during a call has it on
the bill once, after its next start. What a server fails to answer costs nothing. A server's calls
are named `mcp/SERVER` in the price book, on the bill and to limits of models; without a price of
their own they cost what `mcp` costs, or nothing if that has none either."""

from __future__ import annotations

import logging
import time
from asyncio import Future
from collections.abc import Callable

import msgspec

from billing.errors import SpoolError
from billing.events import Attempt, Finish, PriceSet
from billing.money import Pico
from billing.pricing.price_book import PriceBook
from billing.pricing.rating import rate
from billing.spool.spool import Spool
from foundation.tasks import TaskSet
from gateway.inference.metering import (
    ONE_CALL,
    TOOL_CALL,
    new_tool_call,
    to_call_event,
    tool_call_prices,
)
from gateway.limits.counters import SpentUnknown
from gateway.limits.limiter import Limiter
from gateway.limits.outcomes import Admission, Refusal, Units
from gateway.limits.redis.scripts import ScriptFailed
from gateway.limits.spending import to_nano
from gateway.lru import Lru
from gateway.principal import OrgSuspended, Principal
from gateway.settings.mcp_servers import priced_as
from mcp_bridge.caller import Caller
from mcp_bridge.protocol.rpc import INTERNAL_ERROR, LIMITED, RpcError
from mcp_bridge.routing.guard import Outcome
from mcp_bridge.trust.call_records import CallRecord, ReadRecord, Ticket

log = logging.getLogger(__name__)

MAX_CALLERS = 20_000
"""One worker remembers at most this many callers."""


class Callers:
    """The principals of the bridge's callers: each is noted with every request."""

    def __init__(self) -> None:
        self._principals: Lru[str, Principal] = Lru(MAX_CALLERS)

    def note(self, caller: Caller, principal: Principal) -> Caller:
        self._principals.put(caller.principal, principal)
        return caller

    def principal_of(self, caller: Caller) -> Principal:
        """Raises: RpcError."""
        found = self._principals.get(caller.principal)
        if found is None:
            raise RpcError(INTERNAL_ERROR, "Who calls is not known any more; ask again")
        return found


class CallMeter:
    """A Meter of the bridge."""

    def __init__(
        self,
        callers: Callers,
        *,
        limiter: Limiter,
        spool: Spool,
        price_book: PriceBook,
        tasks: TaskSet,
        on_call: Callable[[str, Outcome, float | None], None],
    ) -> None:
        """Take the services of the process. `on_call` hears of those that went out: the server,
        the outcome, and how many seconds that took."""
        self._callers, self._price_book, self._tasks = callers, price_book, tasks
        self.on_call = on_call
        self.limiter, self.spool = limiter, spool

    def price_of(self, principal: Principal, server: str) -> Pico:
        """Return what a paid call costs now."""
        prices = tool_call_prices(self._price_book, principal, priced_as(server), time.time())
        return rate(ONE_CALL, prices).amount_pico

    async def admit(self, call: CallRecord) -> Ticket:
        principal, model = self._served(call.caller), priced_as(call.server)
        if not self.spool.healthy:
            raise not_accounted_for()
        attempt = new_tool_call(call.id, principal, model, self._price_book, call.caller.part_of)
        verdict = await self._admitted(
            principal, model, call.id, attempt.prices, attempt.admitted_at
        )
        return MeteredCall(self, call.server, attempt, verdict)

    async def count(self, read: ReadRecord) -> None:
        """Count a read against the limits that are not about money."""
        principal, model = self._served(read.caller), priced_as(read.server)
        principal = msgspec.structs.replace(principal, spend_caps=())
        now = time.time()
        prices = tool_call_prices(self._price_book, principal, model, now)
        await self._admitted(principal, model, read.id, prices, now)

    def _served(self, caller: Caller) -> Principal:
        """Raises: RpcError."""
        principal = self._callers.principal_of(caller)
        try:
            principal.check_served()
        except OrgSuspended:
            raise RpcError(LIMITED, "An invoice is overdue", {"reason": "suspended"}) from None
        return principal

    async def _admitted(
        self,
        principal: Principal,
        model: str,
        lease_id: str,
        prices: PriceSet,
        admitted_at: float,
    ) -> Admission:
        """Raises: RpcError."""
        try:
            verdict = await self.limiter.admit(
                principal,
                model,
                input_tokens=0,
                max_output_tokens=0,
                lease_id=lease_id,
                lane=TOOL_CALL.lane,
                prices=prices,
                admitted_at=admitted_at,
                num_tool_calls=1,
            )
        except (SpentUnknown, ScriptFailed) as error:
            log.warning("mcp: a call is not admitted: %s", error)
            data = {"reason": "limits_unavailable"}
            raise RpcError(INTERNAL_ERROR, "Limits cannot be asked now", data) from None
        if isinstance(verdict, Refusal):
            raise refused(verdict)
        if verdict.has_lease and verdict.spending is None:
            # No money is held: to limits it is over once it has begun.
            self._tasks.spawn(self.limiter.settle(verdict, Units()), name="settle a call")
        return verdict


class MeteredCall:
    """A Ticket of the bridge."""

    def __init__(
        self, meter: CallMeter, server: str, attempt: Attempt, admission: Admission
    ) -> None:
        self._meter, self._server = meter, server
        self._attempt, self._admission = attempt, admission
        self._begun_at: float | None = None
        self._on_disk: Future[None] | None = None
        self.cost_pico = rate(ONE_CALL, attempt.prices).amount_pico

    async def begun(self) -> None:
        self._begun_at = time.monotonic()
        try:
            self._on_disk = await self._meter.spool.attempt_begun(self._attempt, ONE_CALL)
        except SpoolError:
            raise not_accounted_for() from None

    async def ended(self, outcome: Outcome | None) -> bool:
        paid = False
        if outcome is not None:
            begun_at = self._begun_at
            took_s = None if begun_at is None else time.monotonic() - begun_at
            self._meter.on_call(self._server, outcome, took_s)
        try:
            if outcome is not None and outcome != "failed" and self._on_disk is not None:
                await self._on_disk
                finish: Finish = "disconnect" if outcome == "left" else "done"
                self._meter.spool.close_buffered(to_call_event(self._attempt, finish))
                paid = True
        except SpoolError:
            raise not_accounted_for() from None
        finally:
            if self._begun_at is not None and not paid:
                await self._meter.spool.void(self._attempt.id)
            if self._admission.spending is not None:
                used = Units(cost_nano=to_nano(self.cost_pico) if paid else 0)
                await self._meter.limiter.settle(self._admission, used)
        return paid


def refused(refusal: Refusal) -> RpcError:
    is_money = refusal.kind == "money"
    data: dict[str, object] = {
        "reason": "insufficient_quota" if is_money else "rate_limit_exceeded",
        "scope": refusal.scope,
        "kind": refusal.kind,
        "limit": refusal.limit,
    }
    if refusal.retry_after_s is not None:
        data["retryAfterSeconds"] = refusal.retry_after_s
    message = "The budget is spent" if is_money else "Too many calls; ask again later"
    return RpcError(LIMITED, message, data)


def not_accounted_for() -> RpcError:
    return RpcError(INTERNAL_ERROR, "This gateway cannot account for calls now")
