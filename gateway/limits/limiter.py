"""Two-phase limits: reserve before a request runs, settle what it used.

Above: `inference` admits and settles, `app` starts and closes. Below: `scripts` (Redis). It knows
no HTTP and no money, and keeps nothing that another gateway would miss.

For each key, project and organization, and for a model in a project, a plan may limit tokens per
minute, requests per minute and open leases ("streams"). `admit` takes the input and the output the
key usually writes from all of them or from none. The bound: with r = limit / 60 per second and a
burst B of a sixth of the limit, any 60 seconds let pass at most B + 60 r tokens, counting each
request at its admission with what it used in the end (while it runs: with what it reserved). A
request larger than B, but not than the limit, passes when the bucket is full and leaves debt; its
size then stands for B. What a request writes beyond its reservation becomes debt too, which the
next ones wait for: by so much, summed over those that run at the same time, a minute may exceed the
bound.

The bound has a price: while what is reserved and will not be used exceeds B, part of the rate is
lost to the tenant. Reserving what a key usually writes, instead of max_tokens, keeps it far below.

Costs are whole microseconds of refill, rounded up, so the bound is exact up to 60 million per
minute and within one microsecond's refill above that.

A lease is renewed while its gateway lives. One that is not expires by itself, at the next script
that runs for its organization: its slot and its tokens come back, and a settle that comes after
all (the spool's recovery) is debited in full. Without any limit there is no lease, and Redis is
not asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import chain, islice

from redis.asyncio import Redis

from gateway.limits.expected_output import ExpectedOutput
from gateway.limits.scripts import LimiterUnavailable, Scripts
from gateway.limits.verdicts import (
    KINDS,
    Admission,
    RateState,
    Refusal,
    ScopeLimits,
    Settlement,
    burst,
    rate_window,
    scopes_of,
    tightest,
)
from gateway.principal import Plan, Principal
from gateway.tasks import end

__all__ = ["Admission", "Limiter", "LimiterUnavailable", "RateState", "Refusal", "Settlement"]

log = logging.getLogger(__name__)

LEASE_TTL_S = 60.0
RENEW_INTERVAL_S = LEASE_TTL_S / 3
RENEW_BATCH = 256
MAX_TOKENS = 100_000_000
"""Of one request: keeps Lua's arithmetic exact (10^8 x 60 s in microseconds < 2^53). More, which
only an upstream's own count may claim, stands for this many."""


class Limiter:
    """One per process. `redis` must not decode responses."""

    def __init__(self, redis: Redis) -> None:
        self._scripts = Scripts(redis)
        self._outputs = ExpectedOutput()
        self._open: dict[str, str] = {}
        """Lease id -> org id, of the leases that this process renews."""
        self._renewing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._renewing = asyncio.create_task(self._renew_forever(), name="renew leases")

    async def close(self) -> None:
        """Leases that are still open are left to expire."""
        if self._renewing is not None:
            await end(self._renewing)
            self._renewing = None

    async def admit(
        self,
        principal: Principal,
        model: str,
        *,
        input_tokens: int,
        max_output_tokens: int,
        lease_id: str,
    ) -> Admission | Refusal:
        """Reserve over every scope or none. `lease_id` is made by the server, once per admission;
        repeating a call whose answer was lost reserves nothing twice.

        Raises: LimiterUnavailable.
        """
        expected = self._outputs.expected(principal.key_id, model)
        reserved = input_tokens + min(max_output_tokens, expected)
        scopes = scopes_of(principal, model)
        # What is expected never makes a request too large for its limits, only its input does.
        limits = (scope.plan.tokens_per_minute for scope in scopes)
        reserved = max(input_tokens, min([reserved, *(n for n in limits if n is not None)]))
        reserved = min(MAX_TOKENS, reserved)
        state = RateState()
        if scopes:
            org_keys = _org_keys(principal.org_id)
            reply = await self._scripts.call(
                "admit",
                [*org_keys, *_scope_keys(principal.org_id, scopes)],
                [
                    lease_id,
                    int(LEASE_TTL_S * 1_000_000),
                    reserved,
                    *chain.from_iterable(_limits(scope.plan) for scope in scopes),
                ],
            )
            assert isinstance(reply, list)
            outcome, by_scope, by_kind, wait_us, now_us, *buckets = reply
            assert outcome != 3, "a lease id is made once"
            state = _rate_state(scopes, buckets, now_us)
            if outcome == 0:
                return _refusal(scopes[by_scope - 1], by_kind - 1, wait_us, state)
            self._open[lease_id] = principal.org_id
        return Admission(
            lease_id=lease_id,
            org_id=principal.org_id,
            key_id=principal.key_id,
            model=model,
            reserved=reserved,
            scopes=scopes,
            state=state,
        )

    async def settle(
        self, admission: Admission, *, used_tokens: int, output_tokens: int
    ) -> Settlement:
        """Refund what was reserved and not used, or take what was used beyond it. Idempotent by
        lease.

        Raises: LimiterUnavailable; the lease then expires, and `settle_lease` may still be called.
        """
        if not admission.scopes or admission.lease_id in self._open:  # a retry notes nothing again
            self._outputs.note(admission.key_id, admission.model, output_tokens)
        return await self._close(admission, used_tokens, counts=True)

    async def void(self, admission: Admission) -> Settlement:
        """Nothing ran: give back the tokens and the request. Raises: LimiterUnavailable."""
        return await self._close(admission, 0, counts=False)

    async def settle_lease(self, org_id: str, lease_id: str, *, used_tokens: int) -> Settlement:
        """Settle what another process admitted and did not live to settle. Raises:
        LimiterUnavailable."""
        return await self._settle(_org_keys(org_id), [lease_id, min(MAX_TOKENS, used_tokens), 1])

    async def _close(self, admission: Admission, used_tokens: int, *, counts: bool) -> Settlement:
        if not admission.scopes:
            return Settlement.UNLIMITED
        # Whatever comes of the call, this process is done with the lease.
        self._open.pop(admission.lease_id, None)
        keys = [*_org_keys(admission.org_id), *_scope_keys(admission.org_id, admission.scopes)]
        limits = [scope.plan.tokens_per_minute or 0 for scope in admission.scopes]
        used = min(MAX_TOKENS, used_tokens)
        return await self._settle(keys, [admission.lease_id, used, int(counts), *limits])

    async def _settle(self, keys: list[str], arguments: list[str | int]) -> Settlement:
        reply = await self._scripts.call("settle", keys, arguments)
        assert isinstance(reply, int)
        return Settlement(reply)

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(RENEW_INTERVAL_S)
            try:
                await self.renew()
            except LimiterUnavailable as error:
                log.warning("leases not renewed: %s", error)

    async def renew(self) -> int:
        """Put off the expiry of this process' open leases; returns how many were still open.

        Raises: LimiterUnavailable.
        """
        by_org: dict[str, list[str]] = {}
        for lease_id, org_id in self._open.items():
            by_org.setdefault(org_id, []).append(lease_id)
        renewed = 0
        for org_id, lease_ids in by_org.items():
            remaining = iter(lease_ids)
            while batch := list(islice(remaining, RENEW_BATCH)):
                ttl_us = int(LEASE_TTL_S * 1_000_000)
                reply = await self._scripts.call("renew", _org_keys(org_id), [ttl_us, *batch])
                assert isinstance(reply, int)
                renewed += reply
        return renewed


def _org_keys(org_id: str) -> list[str]:
    """The org's open leases and the prefix of their records; one hash tag, so one slot of a
    cluster."""
    return [f"tollgate:{{{org_id}}}:leases", f"tollgate:{{{org_id}}}:lease:"]


def _scope_keys(org_id: str, scopes: Sequence[ScopeLimits]) -> list[str]:
    return [f"tollgate:{{{org_id}}}:{scope.scope}:{scope.owner_id}" for scope in scopes]


def _limits(plan: Plan) -> list[int]:
    """As `admit.lua` reads them; -1: none."""
    limits = []
    for limit in (plan.tokens_per_minute, plan.requests_per_minute):
        limits += [-1, -1] if limit is None else [limit, burst(limit)]
    streams = plan.max_concurrent_streams
    return [*limits, -1 if streams is None else streams]


def _rate_state(scopes: Sequence[ScopeLimits], buckets: list[int], now_us: int) -> RateState:
    """`buckets`: for each scope the full moments of tokens and of requests, and the open leases."""
    requests, tokens = [], []
    for position, scope in enumerate(scopes):
        tokens_full_us, requests_full_us, _ = buckets[3 * position : 3 * position + 3]
        if (limit := scope.plan.tokens_per_minute) is not None:
            tokens.append(rate_window(limit, tokens_full_us, now_us))
        if (limit := scope.plan.requests_per_minute) is not None:
            requests.append(rate_window(limit, requests_full_us, now_us))
    return RateState(requests=tightest(requests), tokens=tightest(tokens))


def _refusal(by: ScopeLimits, kind: int, wait_us: int, state: RateState) -> Refusal:
    plan = by.plan
    limits = (plan.tokens_per_minute, plan.requests_per_minute, plan.max_concurrent_streams)
    limit = limits[kind]
    assert limit is not None
    return Refusal(
        scope=by.scope,
        kind=KINDS[kind],
        limit=limit,
        retry_after_s=None if wait_us < 0 else wait_us / 1_000_000,
        state=state,
    )
