"""How long a generation stays at an engine that is to be taken away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.protocol import Lane
from gateway.fleet.moving.engine_stay import STAGGER_S, EngineStay, HeldRoutes
from gateway.fleet.router import Fleet, Route
from tests.gateway.office import AsListed

TIMEOUT_S = 600.0
LANES: list[Lane] = ["interactive", "agentic", "batch"]


class Named:
    """An engine of a model, as a fleet sees it."""

    cell = None
    is_available = True

    def __init__(self, model: str | None = "sha256:m", *, is_prefill: bool = False) -> None:
        self.model_identity, self.is_prefill = model, is_prefill
        self.view, self.is_drained, self.is_silent = SimpleNamespace(), False, False

    def may_go_on(self, rest: object) -> bool:
        return True

    def leave(self, attempt_id: str) -> None:
        """It is looked at alone: nobody runs there."""


class Stays:
    """The stays of one generation of each lane at the first of some engines."""

    def __init__(self, *engines: Any) -> None:
        self.engines, self.now_s = engines, 1000.0
        self.fleet = Fleet([route_of(*engines)])
        self.routes = HeldRoutes(self.fleet.routes[0])
        self._stays = {
            lane: EngineStay(
                self.fleet,
                self.routes,
                engines[0],
                lane,
                TIMEOUT_S,
                clock=lambda: self.now_s,
                rng=AsListed(),
            )
            for lane in LANES
        }

    def over(self, after_s: float = 0.0) -> list[str]:
        self.now_s += after_s
        return [lane for lane, stay in self._stays.items() if stay.look()]


def route_of(*engines: Any, model: str = "m") -> Route:
    return Route(model=model, kind="engine", replicas=engines)


def test_one_lane_leaves_after_the_other_and_each_over_some_seconds() -> None:
    stays = Stays(Named(), Named())
    assert stays.over(10 * TIMEOUT_S) == [], "nobody takes it away"
    stays.engines[0].is_drained = True
    assert stays.over() == stays.over(TIMEOUT_S - 1.0) == []
    assert stays.over(1.0 + STAGGER_S) == LANES[:1]
    assert stays.over(STAGGER_S) == LANES[:2]
    assert stays.over(STAGGER_S) == LANES


def test_who_is_undrained_keeps_what_it_has() -> None:
    stays = Stays(Named(), Named())
    stays.engines[0].is_drained = True
    stays.over()
    stays.engines[0].is_drained = False
    assert stays.over(10 * TIMEOUT_S) == []
    stays.engines[0].is_drained = True
    assert stays.over() == [], "its time begins anew"
    assert stays.over(10 * TIMEOUT_S) == LANES


@pytest.mark.parametrize(
    "change",
    [
        {"is_available": False},
        {"is_drained": True},
        {"is_silent": True},
        {"cell": "us-1"},
        {"model_identity": "sha256:other"},
        {"model_identity": None},
        {"is_prefill": True},
    ],
    ids=str,
)
def test_it_stays_where_no_other_engine_could_go_on(change: dict[str, Any]) -> None:
    other = Named()
    stays = Stays(Named(), other)
    stays.engines[0].is_drained = True
    for name, value in change.items():
        setattr(other, name, value)
    stays.over()
    assert stays.over(10 * TIMEOUT_S) == []
    for name in change:
        setattr(other, name, getattr(Named(), name))
    assert stays.over() == LANES


def test_an_engine_that_settings_name_no_more_is_as_one_that_is_drained() -> None:
    first, second = Named(), Named()
    stays = Stays(first, second)
    before, after = stays.routes.route, route_of(second)
    stays.fleet.replace([after])
    assert stays.over() == []
    assert stays.over(10 * TIMEOUT_S) == LANES
    assert stays.routes.route is before, "it holds what it runs at"


def test_who_stays_holds_the_route_that_is_served_now_alone() -> None:
    first = Named()
    stays = Stays(first, Named())
    after = route_of(first)
    stays.fleet.replace([after])
    stays.over()
    assert stays.routes.route is after


@pytest.mark.parametrize("served", [[], [route_of(model="m")]], ids=["model gone", "asleep"])
def test_it_ends_where_it_is_when_nobody_serves_its_model(served: list[Route]) -> None:
    stays = Stays(Named(), Named())
    stays.fleet.replace(served)
    assert stays.over() == stays.over(10 * TIMEOUT_S) == []
