"""Whose turn it is: what a request is worth to the engine, beside what it asks for.

Above: `inference`, `routes.chat`. Below: `principal`, the engine's protocol. It knows no queue: our
engine orders what it runs by this (engine/fairness.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from engine.protocol import Lane
from gateway.fleet.errors import BadField
from gateway.principal import Principal

DEADLINE_HEADER = b"x-request-timeout-ms"
MAX_DEADLINE_MS = 3_600_000
DeadlineS = Annotated[float, Meta(gt=0, le=MAX_DEADLINE_MS / 1000)]


class LaneDeadlines(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds to the first token; what cannot be met is refused at once. None: as it comes."""

    interactive: DeadlineS | None = 60.0
    agentic: DeadlineS | None = 300.0
    batch: DeadlineS | None = None


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    lane: Lane = "interactive"
    tenant: str = ""
    """The org; whose requests share one counter."""
    weight: float = 1.0
    """Of the tenant, in its lane."""
    deadline_s: float | None = None
    """For the first token, from when the engine gets the request."""


def turn_of(
    principal: Principal, deadlines: LaneDeadlines, *, deadline_s: float | None = None
) -> Turn:
    """The narrowest plan that pins a lane says which; an org's plan says what it weighs.
    `deadline_s`: the client's own, which may be sooner than its lane's."""
    plans = (
        principal.key_plan,
        principal.client_plan,
        principal.project_plan,
        principal.org_plan,
    )
    pinned = (plan.lane for plan in plans if plan.lane is not None)
    lane: Lane = next(pinned, "interactive")
    waits = (deadline_s, getattr(deadlines, lane))
    weight = principal.org_plan.weight
    return Turn(
        lane=lane,
        tenant=principal.org_id,
        weight=1.0 if weight is None else weight,
        deadline_s=min((each for each in waits if each is not None), default=None),
    )


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
