"""Simulate what a gateway asks of a request before an engine hears of it, on virtual time.

Knows no queue and no step.

Only Redis is left out. The buckets are those that a gateway has while Redis is away
(`local_buckets`), here with all of each limit and of its burst, which is what the scripts let pass;
but for this, that a reservation's rest is given back whole, where a script gives back no more than
would not have run over meanwhile. What is written beyond a reservation is taken at the end: no
stream rests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from engine.config import BLOCK_SIZE
from engine.prefix_digests import SPAN_BLOCKS, span_keys
from engine.protocol import Lane, ReplicaStatus
from gateway.fleet.engine.prefix_memory import PrefixMemory
from gateway.fleet.engine_view import EngineView
from gateway.fleet.errors import ReplicaOverloaded
from gateway.fleet.predicted_time import PredictionError, Prompt
from gateway.fleet.sent_work import SentWork
from gateway.inference.generate import check_in_time
from gateway.lanes import LaneDeadlines, Priority
from gateway.limits.outcomes import Units, reservation, scopes_of
from gateway.limits.output_forecast import ExpectedOutput
from gateway.limits.redis.keys import scope_keys
from gateway.limits.redis.local_buckets import LocalBuckets
from gateway.limits.redis.scope_limits import ScopeLimits
from gateway.principal import Plan, Principal

MODEL = "model"
Refused = Literal["late", "limit"]


_Known = tuple[Priority, tuple[ScopeLimits, ...], list[str]]
"""The part of a tenant's requests in a lane that is the same for all of them."""


class Rules(msgspec.Struct, frozen=True):
    plans: Mapping[str, Plan]
    """The plan of each tenant; tenants without one are unlimited."""
    deadlines: LaneDeadlines = LaneDeadlines()


class _Reserved(msgspec.Struct, frozen=True):
    tenant: str
    keys: Sequence[str]
    scopes: tuple[ScopeLimits, ...]
    units: dict[str, int]


class SimulatedAdmission:
    """`clock`: seconds, as everywhere in the simulation."""

    def __init__(self, rules: Rules, clock: Callable[[], float]) -> None:
        self._rules = rules
        self._buckets = LocalBuckets(clock, share=1.0, burst_parts=1)
        self._outputs, self._sent = ExpectedOutput(), PrefixMemory()
        self._known: dict[tuple[str, Lane], _Known] = {}
        self._open: dict[str, _Reserved] = {}
        self._view, self._error = EngineView(SentWork(), clock=clock), PredictionError()
        self._predicted_s: dict[str, float] = {}
        """By request, before it was corrected."""

    def heard(self, status: ReplicaStatus) -> None:
        """Hear what the engine says of itself."""
        self._view.heard(status)

    def began(self, name: str, took_s: float) -> None:
        """Hear how long a request's first token took."""
        predicted_s = self._predicted_s.pop(name, None)
        if predicted_s is not None:
            self._error.observe(predicted_s, took_s)

    def deadline_s(self, lane: Lane) -> float | None:
        limit: float | None = getattr(self._rules.deadlines, lane)
        return limit

    def refuses(
        self,
        name: str,
        tenant: str,
        lane: Lane,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        salt: str,
    ) -> Refused | None:
        """Why request `name` may not pass, or None: it may, and what it needs is reserved."""
        spans = span_keys(salt, prompt, BLOCK_SIZE)
        num_cached = SPAN_BLOCKS * BLOCK_SIZE * self._sent.spans_sent(spans, within_s=math.inf)
        work = Prompt.of(len(prompt), num_cached)
        priority, scopes, keys = self._known_of(tenant, lane)
        if self._view.price.is_learnt:
            predicted_s = self._view.seconds_to_first_token(work, lane)
            try:
                check_in_time(predicted_s * self._error.factor, priority.deadline_s)
            except ReplicaOverloaded:
                return "late"
            self._predicted_s[name] = predicted_s
        if scopes:
            expected = min(max_tokens, self._outputs.expected(tenant, MODEL))
            units = reservation(scopes, len(prompt), expected).by_letter(requests=1)
            if self._buckets.admit(keys, scopes, units) is not None:
                return "limit"
            self._open[name] = _Reserved(tenant, keys, scopes, units)
        self._sent.sent(spans, SPAN_BLOCKS * BLOCK_SIZE)
        self._view.send(work, lane)
        return None

    def settle(self, name: str, prompt: int, written: int) -> None:
        reserved = self._open.pop(name, None)
        if reserved is not None:
            self._outputs.note(reserved.tenant, MODEL, written)
            used = Units(input_tokens=prompt, output_tokens=written).by_letter(requests=1)
            self._buckets.settle(reserved.keys, reserved.scopes, reserved.units, used)

    def void(self, name: str) -> None:
        """It never ran."""
        self._predicted_s.pop(name, None)
        reserved = self._open.pop(name, None)
        if reserved is not None:
            nothing = Units().by_letter()
            self._buckets.settle(reserved.keys, reserved.scopes, reserved.units, nothing)

    def _known_of(self, tenant: str, lane: Lane) -> _Known:
        found = self._known.get((tenant, lane))
        if found is None:
            scopes = scopes_of(_principal(tenant, self._rules.plans.get(tenant)), MODEL, lane)
            priority = Priority(lane=lane, tenant=tenant, deadline_s=self.deadline_s(lane))
            found = self._known[tenant, lane] = priority, scopes, scope_keys(tenant, scopes)
        return found


def _principal(tenant: str, plan: Plan | None) -> Principal:
    who = Principal(
        org_id=tenant, project_id=tenant, key_id=tenant, key_hint="", scopes=frozenset()
    )
    return who if plan is None else msgspec.structs.replace(who, org_plan=plan)
