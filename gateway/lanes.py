"""Whose turn it is: what a request is worth to the engine, beside what it asks for.

Above: `inference`, `routes.chat`. Below: `principal`, the engine's protocol. It knows no queue: our
engine orders what it runs by this (engine/fairness.py).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from engine.protocol import Lane
from gateway.fleet.errors import BadField
from gateway.principal import Principal

DEADLINE_HEADER = b"x-request-timeout-ms"
MAX_DEADLINE_MS = 3_600_000


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    lane: Lane = "interactive"
    tenant: str = ""
    """The org; whose requests share one counter."""
    weight: float = 1.0
    """Of the tenant, in its lane."""
    deadline_s: float | None = None
    """For the first token, from when the engine gets the request."""


def turn_of(principal: Principal, *, deadline_s: float | None = None) -> Turn:
    """The narrowest plan that pins a lane says which; an org's plan says what it weighs."""
    plans = (principal.key_plan, principal.project_plan, principal.org_plan)
    lanes = (plan.lane for plan in plans if plan.lane is not None)
    weight = principal.org_plan.weight
    return Turn(
        lane=next(lanes, "interactive"),
        tenant=principal.org_id,
        weight=1.0 if weight is None else weight,
        deadline_s=deadline_s,
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
