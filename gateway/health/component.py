"""Describes one part that requests depend on, for readiness, `/v1/admin/health`, `/metrics` and
`tollgate status` alike."""

from __future__ import annotations

from typing import Literal

import msgspec

from gateway.fleet.contact import ContactState
from gateway.fleet.replica import Replica, ReplicaHealth, is_observed
from gateway.generate_request import ModelKind

Kind = Literal["spool", "postgres", "redis", "engine", "upstream"]
State = Literal[ContactState, "vacant", "resting", "low_space", "quarantine", "full", "broken"]
"""`resting`: left alone for a time, by a breaker of our own. `vacant`: a place for an engine that
joins from another machine, where none is. `full`, `broken`, `low_space`, `quarantine`: of the
spool; it cannot write, or records wait for a person."""
Status = Literal["ready", "degraded", "unready"]
GOOD = ("unknown", "ok", "vacant")
USELESS = ("vacant", "unreachable", "unauthorised", "resting")
"""States of a replica in which no request would be served by it."""


class Component(msgspec.Struct, frozen=True, kw_only=True):
    """Times are Unix seconds."""

    kind: Kind
    name: str
    state: State
    reachable: bool | None = None
    """Null: it is not known, or there is nothing to reach."""
    authorised: bool | None = None
    """Whether it accepts this gateway's credentials. Null: it is not known, or it wants none."""
    since: int | None = None
    """When it came into this state."""
    detail: str | None = None
    last_error: str | None = None
    last_error_at: int | None = None

    @property
    def is_good(self) -> bool:
        return self.state in GOOD


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The health of one worker, as far as it is known there."""

    status: Status
    missing: list[str]
    """The reasons why this worker cannot serve any request at all."""
    components: list[Component]


def seconds(moment: float | None) -> int | None:
    return None if moment is None else int(moment)


def since_of(component: Component, health: ReplicaHealth) -> int | None:
    """Return since when a replica is as it is shown: in its state, and drained or not."""
    moments = (component.since, seconds(health.drain_changed_at))
    return max((each for each in moments if each is not None), default=None)


def replica_component(kind: ModelKind, replica: Replica) -> Component:
    """Return how an engine or an upstream is; one of ours is asked, one of others was seen."""
    health = replica.health()
    if not is_observed(replica):
        away: State = "vacant" if health.is_vacant else "unreachable"
        state: State = "ok" if health.available else away
        return Component(kind=kind, name=replica.name, state=state, reachable=health.available)
    seen = replica.contact.observation
    state = seen.state
    if not health.available and state not in USELESS:
        state = "resting"
    return Component(
        kind=kind,
        name=replica.name,
        state=state,
        reachable=seen.reachable,
        authorised=seen.authorised,
        since=seconds(seen.since),
        last_error=seen.last_error,
        last_error_at=seconds(seen.last_error_at),
    )
