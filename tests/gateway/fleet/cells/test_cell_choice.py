"""Requests stay in their cell unless none of its engines is up, or it is late and another cell is
clearly sooner."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.fake.engine import FakeCore
from engine.protocol import Lane, LaneStatus, StepCosts
from gateway.fleet.replica import ReplicaHealth
from gateway.fleet.router import Fleet, Route, RoutedRequest
from gateway.fleet.routing import explain
from gateway.lanes import Priority
from gateway.request_log.route_choice import read_choice
from tests.gateway.office import ViewedScript

COSTS = StepCosts(prompt_token_s=1e-3)


class PreparedLike(msgspec.Struct):
    """A request as far as the router looks at it."""

    input_tokens: int
    computed_by: str | None = None


class SeenEngine(ViewedScript):
    """An engine at which prompts of so many seconds wait, in its own cell or another one."""

    def __init__(self, name: str, waits_s: float = 0.0, cell: str | None = None) -> None:
        super().__init__(name)
        self.cell = cell
        self.wait(waits_s)

    def wait(self, seconds: float) -> None:
        lanes: dict[Lane, LaneStatus] = {
            "interactive": LaneStatus(waiting_tokens=round(seconds / COSTS.prompt_token_s))
        }
        self.view.heard(msgspec.structs.replace(FakeCore().status(), costs=COSTS, lanes=lanes))

    def health(self) -> ReplicaHealth:
        return ReplicaHealth(name=self.name, available=self.is_available)


def fleet_of(*engines: SeenEngine) -> tuple[Fleet, Route]:
    route = Route(model="m", kind="engine", replicas=engines, has_borrowed=True)
    return Fleet([route], clock=lambda: 0.0), route


def routed(*engines: SeenEngine, promised_s: float | None = 1.0) -> RoutedRequest:
    fleet, route = fleet_of(*engines)
    prepared: Any = PreparedLike(100)
    return fleet.choose(
        route, fleet.order(route), prepared, Priority(), latest_s=lambda _: promised_s
    )


def names(found: RoutedRequest) -> list[str]:
    return [each.name for each in found.replicas]


def reason(found: RoutedRequest) -> str:
    assert found.choice is not None
    return found.choice.reason


def test_a_request_stays_where_it_is_in_time_however_idle_another_cell_is() -> None:
    found = routed(SeenEngine("m/0", 0.8), SeenEngine("m/us:1", cell="us"))
    assert (names(found), reason(found)) == (["m/0", "m/us:1"], "least_work")


def test_a_request_to_which_nothing_was_promised_stays() -> None:
    found = routed(SeenEngine("m/0", 60.0), SeenEngine("m/us:1", cell="us"), promised_s=None)
    assert names(found)[0] == "m/0"


def test_a_request_that_would_be_late_goes_where_it_is_clearly_sooner() -> None:
    found = routed(SeenEngine("m/0", 5.0), SeenEngine("m/us:1", cell="us"))
    assert (names(found), reason(found)) == (["m/us:1", "m/0"], "cell_late")
    assert found.soonest_s == pytest.approx(0.1, abs=0.05)
    assert found.choice is not None
    read = read_choice(explain(found.choice, names(found)))
    assert read is not None and read.reason == "cell_late"
    assert [each.replica for each in read.candidates] == ["us:1", "0"]
    assert read.candidates[1].predicted_ttft_s == pytest.approx(5.1, abs=0.1)


@pytest.mark.parametrize(("round_trip_s", "goes"), [(0.0, True), (3.0, True), (4.0, False)])
def test_the_round_trip_counts(round_trip_s: float, goes: bool) -> None:
    there = SeenEngine("m/us:1", cell="us")
    there.round_trip_s = round_trip_s
    found = routed(SeenEngine("m/0", 5.0), there)
    assert (names(found)[0] == "m/us:1") is goes


def test_a_request_goes_where_what_was_promised_is_kept() -> None:
    found = routed(SeenEngine("m/0", 1.0), SeenEngine("m/us:1", 0.8, cell="us"))
    assert (names(found)[0], reason(found)) == ("m/us:1", "cell_late")


def test_a_request_stays_where_both_are_late_alike() -> None:
    found = routed(SeenEngine("m/0", 5.0), SeenEngine("m/us:1", 4.5, cell="us"))
    assert names(found) == ["m/0", "m/us:1"]


def test_a_cell_that_is_down_is_left_and_the_soonest_of_the_others_comes_first() -> None:
    own = SeenEngine("m/0")
    own.is_available = False
    found = routed(own, SeenEngine("m/us:1", 3.0, cell="us"), SeenEngine("m/asia:2", cell="asia"))
    assert (names(found), reason(found)) == (["m/asia:2", "m/us:1", "m/0"], "cell_down")


def test_one_engine_of_several_that_is_up_keeps_requests_at_home() -> None:
    down, up, there = SeenEngine("m/0"), SeenEngine("m/3", 0.5), SeenEngine("m/us:1", cell="us")
    down.is_available = False
    assert names(routed(down, up, there)) == ["m/3", "m/us:1", "m/0"]


def test_what_is_not_lent_now_is_no_replica() -> None:
    own, away = SeenEngine("m/0", 5.0), SeenEngine("m/us:1", cell="us")
    away.is_available = False
    fleet, route = fleet_of(own, away)
    assert fleet.order(route) == [own]
    own.is_available = False
    assert fleet.order(route) == [own], "whoever dies is waited for, as without other cells"


def test_an_engine_that_failed_is_down_while_it_cools_down() -> None:
    own, there = SeenEngine("m/0"), SeenEngine("m/us:1", cell="us")
    fleet, route = fleet_of(own, there)
    fleet.report(own, ok=False)
    prepared: Any = PreparedLike(100)
    found = fleet.choose(route, fleet.order(route), prepared, Priority())
    assert (names(found), reason(found)) == (["m/us:1", "m/0"], "cell_down")


def test_engines_of_other_cells_are_not_counted_among_a_models_own() -> None:
    _, route = fleet_of(SeenEngine("m/0"), SeenEngine("m/us:1", cell="us"))
    assert route.pool_states()["serving"] == 1
