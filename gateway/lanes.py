"""Ranks requests: what each is worth to the engine, beside what it asks for.

It knows no queue and no price: our engine orders what it runs by this (engine/fairness.py).

The lane is the one that a plan pins, or else the lowest that anything speaks for: the tier `flex`
for batch, tools for agentic, the key for the one that it is marked with. The tier is what is served
and billed, and said in the answer: `flex` in the batch lane alone, `priority` above it and only
where it has a price of its own, with twice the weight; whatever else was asked for is `default`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from billing.events import Tier
from engine.fairness import LANE_RANKS
from engine.protocol import Lane, LaneStatus
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


def first_token_s(lane: LaneStatus, num_tokens: int) -> float | None:
    """Until so many of a prompt are computed behind all that waits in the lane, at the rate at
    which its prompts are computed while some of them wait. None: that is not known."""
    if not lane.prefill_tokens_per_s:
        return None
    return (lane.waiting_tokens + num_tokens) / lane.prefill_tokens_per_s


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
