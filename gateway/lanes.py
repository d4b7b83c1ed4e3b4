"""Ranks requests: what each is worth to the engine, beside what it asks for.

It knows no queue and no price: our engine orders what it runs by this (engine/fairness.py).

The lane is the one that a plan pins, or else the lowest that anything speaks for: the tier `flex`
for batch, tools for agentic, the key for the one that it is marked with. The tier is what is served
and billed, and said in the answer: `flex` in the batch lane alone, `priority` above it and only
where it has a price of its own, with twice the weight; whatever else was asked for is `default`.

A lane also promises something: its service level objective (SLO), by which answers are judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from billing.events import Tier
from engine.fairness import LANE_RANKS
from engine.protocol import Lane
from gateway.generate_request import GenerateRequest, ServiceTier
from gateway.principal import Principal
from gateway.request_errors import BadField

DEADLINE_HEADER = b"x-request-timeout-ms"
MAX_DEADLINE_MS = 3_600_000
PRIORITY: tuple[ServiceTier, ...] = ("priority", "fast")
PRIORITY_WEIGHT = 2.0
"""Times the tenant's own."""
DeadlineS = Annotated[float, Meta(gt=0, le=MAX_DEADLINE_MS / 1000)]


class LaneDeadlines(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds to the first token; what cannot be met is refused at once. None: as it comes."""

    interactive: DeadlineS | None = 60.0
    agentic: DeadlineS | None = 300.0
    batch: DeadlineS | None = None


SloSeconds = Annotated[float, Meta(gt=0, le=86_400)]
CLIENT_LEFT_STATUS = 499
"""The status under which a request is counted whose client left."""
SloOutcome = Literal["met", "late_first_token", "slow_tokens", "failed"]
"""A request that met its SLO, or the first part of it that it missed."""
SLO_OUTCOMES: tuple[SloOutcome, ...] = ("met", "late_first_token", "slow_tokens", "failed")


class Slo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The service level objective of a request: it meets both or none."""

    ttft_s: SloSeconds
    """Seconds to the first token, from the first byte of the request."""
    ttft_per_prefill: Annotated[float, Meta(ge=1, le=1000)] | None = None
    """As many times the seconds that its prompt would take an idle replica come on top. A request
    that no replica would serve in that time is refused at once, unless it is a batch's. None:
    `ttft_s` is all, whatever the prompt, and nothing is refused by it."""
    tpot_s: SloSeconds
    """Seconds per output token after the first, on average (MLPerf's TPOT)."""

    def first_token_limit_s(self, idle_prefill_s: float | None) -> float:
        """Return how late the first token may be. `idle_prefill_s`: what the prompt would take an
        idle replica; None: nobody knows."""
        return self.ttft_s + (self.ttft_per_prefill or 0.0) * (idle_prefill_s or 0.0)


class LaneSlos(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[slo]`: the objectives of each lane, for models that have none of their own.

    Interactive: MLPerf Inference's limits of Llama 2 70B Interactive (since round v5.0;
    `loadgen/mlperf.conf`). Agentic: its Server limits of Llama 3.1 405B, the long prompts of that
    suite. Batch: ours; an hour until it begins, then a token a second.
    """

    interactive: Slo = Slo(ttft_s=0.45, tpot_s=0.04)
    agentic: Slo = Slo(ttft_s=6.0, tpot_s=0.175)
    batch: Slo = Slo(ttft_s=3600.0, tpot_s=1.0)
    target: Annotated[float, Meta(ge=0.5, lt=1)] = 0.99
    """The share of requests that is to meet them: MLPerf's is the 99th percentile."""


class ModelSlos(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`slo` of a model: what its requests are judged by in place of `[slo]`."""

    interactive: Slo | None = None
    agentic: Slo | None = None
    batch: Slo | None = None


class SloTable:
    """Finds the objective of a request. `own`: those of models, by every name they have."""

    def __init__(
        self, lanes: LaneSlos | None = None, own: Mapping[str, ModelSlos] | None = None
    ) -> None:
        lanes = lanes or LaneSlos()
        self.target = lanes.target
        self._lanes = {lane: getattr(lanes, lane) for lane in LANE_RANKS}
        self._own: dict[tuple[str, Lane], Slo] = {
            (model, lane): slo
            for model, slos in (own or {}).items()
            for lane in LANE_RANKS
            if (slo := getattr(slos, lane)) is not None
        }

    def of(self, model: str, lane: Lane) -> Slo:
        return self._own.get((model, lane)) or self._lanes[lane]


class ServedRequest(NamedTuple):
    """How a request was served, as far as its SLO asks."""

    status: int
    """HTTP's; 499: the client left first."""
    duration_s: float
    """Until its last byte, or until it ended."""
    ttft_s: float | None
    """None: no token was seen coming."""
    tpot_s: float | None
    """None: there was one token, or none was seen coming after the first."""
    output_tokens: int
    """Generated, whether or not they were seen coming."""
    idle_prefill_s: float | None = None
    """Seconds that its prompt would have taken an idle replica; None: nobody knows."""


def judge(slo: Slo, served: ServedRequest) -> SloOutcome | None:
    """Tell whether a request met its SLO, or what it missed; None: it does not count.

    It counts unless the client was refused for its own doing (4xx), left while all was well, or
    nothing was generated (embeddings). A refusal for want of room (5xx) is a failure: whoever turns
    slow requests away does not serve more of them in time. An answer that an upstream gave whole
    has as long as its first token and all others together.
    """
    left = served.status == CLIENT_LEFT_STATUS
    if served.status >= 500:
        return "failed"
    if served.status >= 400 and not left:
        return None
    limit_s = slo.first_token_limit_s(served.idle_prefill_s)
    if served.ttft_s is None:
        return _judge_whole(slo, served, limit_s, left=left)
    if served.ttft_s > limit_s:
        return "late_first_token"
    return "slow_tokens" if (served.tpot_s or 0.0) > slo.tpot_s else "met"


def _judge_whole(
    slo: Slo, served: ServedRequest, limit_s: float, *, left: bool
) -> SloOutcome | None:
    if left:
        return "late_first_token" if served.duration_s > limit_s else None
    if served.output_tokens == 0:
        return None
    most_s = limit_s + slo.tpot_s * (served.output_tokens - 1)
    return "slow_tokens" if served.duration_s > most_s else "met"


class Priority(msgspec.Struct, frozen=True, kw_only=True):
    lane: Lane = "interactive"
    tenant: str = ""
    """The org; whose requests share one counter."""
    weight: float = 1.0
    """The tenant's weight within its lane."""
    deadline_s: float | None = None
    """Seconds for the first token, from when the request came; each stage hands on what is left."""
    tier: Tier = "default"
    """The tier that it is served and billed as."""

    def after(self, spent_s: float) -> Priority:
        """Return the priority so long after the request came: with what is left until its deadline,
        which may be nothing."""
        if self.deadline_s is None:
            return self
        return msgspec.structs.replace(self, deadline_s=self.deadline_s - spent_s)


def not_sold(_model: str) -> bool:
    """Return False: no model has a price for priority."""
    return False


def priority_of(
    principal: Principal,
    deadlines: LaneDeadlines,
    request: GenerateRequest,
    *,
    deadline_s: float | None = None,
    sells_priority: Callable[[str], bool] = not_sold,
    is_batch: bool = False,
) -> Priority:
    """An org's plan says what it weighs. `deadline_s`: the client's own, which may be sooner than
    its lane's. `sells_priority`: whether a model has a price for it now.
    `is_batch`: nobody waits for it, and it is served as a batch whatever it asks."""
    weight = 1.0 if principal.org_plan.weight is None else principal.org_plan.weight
    if is_batch:
        return Priority(lane="batch", tenant=principal.org_id, weight=weight, tier="batch")
    lane = lane_of(principal, request)
    tier: Tier = "default"
    if request.service_tier == "flex" and lane == "batch":
        tier = "flex"
    elif request.service_tier in PRIORITY and lane != "batch" and sells_priority(request.model):
        tier = "priority"
    waits = (deadline_s, getattr(deadlines, lane))
    return Priority(
        lane=lane,
        tenant=principal.org_id,
        weight=weight * PRIORITY_WEIGHT if tier == "priority" else weight,
        deadline_s=min((each for each in waits if each is not None), default=None),
        tier=tier,
    )


def lane_of(principal: Principal, request: GenerateRequest) -> Lane:
    """The narrowest plan that pins one says which."""
    plans = (
        principal.key_plan,
        principal.client_plan,
        principal.project_plan,
        principal.org_plan,
    )
    for plan in plans:
        if plan.lane is not None:
            return plan.lane
    asked: list[Lane] = ["interactive"]
    if request.has_tools:
        asked.append("agentic")
    if request.service_tier == "flex":
        asked.append("batch")
    if principal.key_lane is not None:
        asked.append(principal.key_lane)
    return max(asked, key=LANE_RANKS.__getitem__)


def latest_first_token_s(
    priority: Priority, slo: Slo | None, idle_prefill_s: float | None, spent_s: float
) -> float | None:
    """Return the seconds from now within which a first token is worth having: its deadline, and
    what its objective allows where that grows with the prompt; a batch has none. None: whenever.
    `spent_s`: since the request was here whole; what its client took to send it is no reason to
    refuse it."""
    if slo is None or slo.ttft_per_prefill is None or idle_prefill_s is None:
        return priority.deadline_s
    return promised_first_token_s(priority, slo, idle_prefill_s, spent_s)


def promised_first_token_s(
    priority: Priority, slo: Slo | None, idle_prefill_s: float | None, spent_s: float
) -> float | None:
    """Return the seconds from now within which a first token meets its deadline and its objective,
    whether or not one that comes later is refused; a batch has none. None: whenever."""
    latest_s = priority.deadline_s
    if slo is None or priority.lane == "batch":
        return latest_s
    promised_s = slo.first_token_limit_s(idle_prefill_s) - spent_s
    return promised_s if latest_s is None else min(latest_s, promised_s)


def read_deadline_s(headers: Iterable[tuple[bytes, bytes]]) -> float | None:
    """From ASGI's headers. Raises: BadField."""
    found = [value for name, value in headers if name == DEADLINE_HEADER]
    if not found:
        return None
    name = DEADLINE_HEADER.decode()
    text = found[0].decode("latin-1")
    if len(found) > 1 or not (text.isascii() and text.isdigit() and len(text) < 10):
        raise BadField(f"Invalid value for '{name}': not one whole number.", param=name)
    if not 1 <= int(text) <= MAX_DEADLINE_MS:
        raise BadField(f"Invalid value for '{name}': 1 to {MAX_DEADLINE_MS}.", param=name)
    return int(text) / 1000
