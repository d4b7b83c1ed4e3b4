"""Which replica is asked first, and which ones after it.

Above: `inference` (order, report), `routes` (resolve, routes), readiness. Below: the replicas.
Knows no request: what is asked for makes no difference here, and who asks only to which models
there are.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from billing.cache_contracts import ContractName
from gateway.fleet.errors import UnknownModel
from gateway.fleet.replica import Replica
from gateway.fleet.waiting_room import WaitingRoom
from gateway.principal import Principal
from gateway.wire.from_openai import ModelKind

COOL_DOWN_MIN_S = 1.0
COOL_DOWN_MAX_S = 30.0
"""A replica that failed comes last for so long; each further failure in a row doubles it."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """A model as customers name it, and what serves it."""

    model: str
    kind: ModelKind
    replicas: tuple[Replica, ...]
    rooms: tuple[WaitingRoom, ...] = ()
    """Of its upstreams that have one."""
    cache_contract: ContractName | None = None
    """By which what its engine reused is counted; None: an upstream counts by itself."""


class Fleet:
    """`routes`: at most one per model; each with at least one replica."""

    def __init__(
        self,
        routes: Iterable[Route],
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._routes = {route.model: route for route in routes}
        self._clock = clock
        self._rng = rng or random.Random()
        self._failures: dict[Replica, Failures] = {}

    @property
    def routes(self) -> Sequence[Route]:
        return tuple(self._routes.values())

    def resolve(self, model: str, principal: Principal) -> Route:
        """Raises UnknownModel, for what is not served and for what it may not use alike."""
        route = self._routes.get(model)
        if route is None or not principal.may_use(model):
            raise UnknownModel(
                f"The model `{model}` does not exist or you do not have access to it.",
                param="model",
            )
        return route

    def order(self, route: Route) -> Sequence[Replica]:
        """All of them, the best first: healthy ones before failing ones, then by load (engines) or
        by what waits here for them (upstreams), then drawn by weight."""
        if len(route.replicas) == 1:
            return route.replicas
        by_load = route.kind == "engine"
        return sorted(route.replicas, key=lambda replica: self._rank(replica, by_load))

    def report(self, replica: Replica, *, ok: bool) -> None:
        """What came of asking it; `ok=False` when nothing ran."""
        if ok:
            self._failures.pop(replica, None)
            return
        failures = self._failures.setdefault(replica, Failures())
        failures.in_a_row += 1
        cool_down_s = min(COOL_DOWN_MIN_S * 2 ** (failures.in_a_row - 1), COOL_DOWN_MAX_S)
        failures.until = self._clock() + cool_down_s

    async def start(self) -> None:
        for replica in self._replicas():
            await replica.start()

    async def close(self) -> None:
        for replica in self._replicas():
            await replica.close()

    def _replicas(self) -> Iterable[Replica]:
        return (replica for route in self._routes.values() for replica in route.replicas)

    def _rank(self, replica: Replica, by_load: bool) -> tuple[bool, float, float]:
        health = replica.health()
        failures = self._failures.get(replica)
        failing = failures is not None and self._clock() < failures.until
        running, waiting = health.num_running, health.num_waiting
        load = (running + waiting) / replica.weight if by_load else health.backlog
        # Exponential draws, divided by the weights, order by weight without replacement
        # (Efraimidis and Spirakis, 2006).
        return failing or not health.available, load, self._rng.expovariate(replica.weight)


class Failures(msgspec.Struct):
    in_a_row: int = 0
    until: float = 0.0
    """Clock seconds."""
