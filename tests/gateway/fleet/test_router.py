"""Fleet: names, order by health, load and weight, and how long a failure is remembered."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from gateway.fleet.replica import ReplicaHealth
from gateway.fleet.router import COOL_DOWN_MAX_S, Fleet, Route, affinity
from gateway.generate_request import GenerateRequest
from gateway.principal import Principal
from gateway.request_errors import UnknownModel

ANYBODY = Principal(org_id="o", project_id="p", key_id="k", key_hint="", scopes=frozenset())


class RoutedReplica:
    """A replica as far as the router looks at it."""

    def __init__(self, name: str, weight: int = 1, load: int = 0) -> None:
        self.name, self.weight, self.load = name, weight, load
        self.available, self.is_drained = True, False
        self.calls: list[str] = []

    def health(self) -> ReplicaHealth:
        return ReplicaHealth(
            name=self.name,
            available=self.available,
            num_running=self.load,
            backlog=float(self.load),
            is_drained=self.is_drained,
        )

    async def start(self) -> None:
        self.calls.append("start")

    async def close(self) -> None:
        self.calls.append("close")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def fleet_of(*places: Any, kind: Any = "upstream") -> tuple[Fleet, Route, Clock]:
    clock = Clock()
    route = Route(model="m", kind=kind, replicas=places)
    return Fleet([route], clock=clock, rng=random.Random(7)), route, clock


def report(fleet: Fleet, place: Any, *, ok: bool) -> None:
    fleet.report(place, ok=ok)


def names(fleet: Fleet, route: Route, affinity: bytes | None = None) -> list[str]:
    return [replica.name for replica in fleet.order(route, affinity)]


def key(text: str, org_id: str = "o") -> bytes:
    request = GenerateRequest(model="m", stream=False, include_usage=False, cache_key=text)
    found = affinity(request, msgspec.structs.replace(ANYBODY, org_id=org_id))
    assert found is not None
    return found


def test_models_by_name() -> None:
    fleet, route, _ = fleet_of(RoutedReplica("a"))
    assert fleet.resolve("m", ANYBODY) is route
    assert fleet.routes == (route,)
    with pytest.raises(UnknownModel) as caught:
        fleet.resolve("nope", ANYBODY)
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("allowed", "denied", "may"),
    [
        (None, set(), True),
        ({"m", "n"}, set(), True),
        ({"n"}, set(), False),
        (set(), set(), False),
        (None, {"m"}, False),
        ({"m"}, {"m"}, False),
        (None, {"n"}, True),
    ],
)
def test_what_a_caller_may_not_use_is_as_good_as_unknown(
    allowed: set[str] | None, denied: set[str], may: bool
) -> None:
    fleet, route, _ = fleet_of(RoutedReplica("a"))
    caller = msgspec.structs.replace(
        ANYBODY,
        allowed_models=None if allowed is None else frozenset(allowed),
        denied_models=frozenset(denied),
    )
    if may:
        assert fleet.resolve("m", caller) is route
        return
    with pytest.raises(UnknownModel) as refused:
        fleet.resolve("m", caller)
    with pytest.raises(UnknownModel) as unknown:
        fleet.resolve("nope", caller)
    assert refused.value.message.replace("`m`", "`nope`") == unknown.value.message


@pytest.mark.parametrize(
    ("served", "usable", "only"),
    [
        ({"a": None}, None, "a"),
        ({"a": None, "a-legal": "a", "a-terse": "a"}, None, "a"),
        ({"a": None, "a-legal": "a"}, {"a-legal"}, "a-legal"),
        ({"a": None, "a-legal": "a", "a-terse": "a"}, {"a-legal", "a-terse"}, None),
        ({"a": None, "b": None}, None, None),
        ({"a": None, "b": None}, {"b"}, "b"),
        ({"a": None}, {"c"}, None),
    ],
)
def test_who_names_no_model_means_the_only_one_beside_its_adapters(
    served: dict[str, str | None], usable: set[str] | None, only: str | None
) -> None:
    fleet = Fleet(
        Route(model=name, kind="engine", replicas=(), parent=parent)
        for name, parent in served.items()
    )
    allowed = None if usable is None else frozenset(usable)
    caller = msgspec.structs.replace(ANYBODY, allowed_models=allowed)
    assert fleet.only_model(caller) == only


def test_the_first_is_drawn_by_weight_and_the_rest_follow() -> None:
    fleet, route, _ = fleet_of(RoutedReplica("a", 3), RoutedReplica("b", 1), RoutedReplica("c", 1))
    orders = [names(fleet, route) for _ in range(5000)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    firsts = Counter(order[0] for order in orders)
    assert abs(firsts["a"] / 5000 - 3 / 5) < 0.03
    seconds = Counter(order[1] for order in orders if order[0] == "b")
    assert abs(seconds["a"] / seconds.total() - 3 / 4) < 0.05


def test_a_cache_key_goes_to_the_same_replica_in_every_process() -> None:
    places = RoutedReplica("a", 3), RoutedReplica("b", 1), RoutedReplica("c", 1)
    fleet, route, _ = fleet_of(*places)
    other, same_route, _ = fleet_of(*places)
    keys = [key(str(number)) for number in range(2000)]
    orders = [names(fleet, route, each) for each in keys]
    assert orders == [names(other, same_route, each) for each in keys]
    firsts = Counter(order[0] for order in orders)
    assert abs(firsts["a"] / 2000 - 3 / 5) < 0.04, "by weight"
    without_c, shorter, _ = fleet_of(*places[:2])
    left = [[name for name in order if name != "c"] for order in orders]
    assert left == [names(without_c, shorter, each) for each in keys], "only c's keys moved"


def test_a_cache_key_of_another_org_is_another() -> None:
    fleet, route, _ = fleet_of(*(RoutedReplica(name) for name in "abcdefgh"))
    assert len({names(fleet, route, key("k", f"o{number}"))[0] for number in range(50)}) > 4


def test_who_names_no_cache_key_is_drawn_for() -> None:
    request = GenerateRequest(model="m", stream=False, include_usage=False)
    assert affinity(request, ANYBODY) is None


def test_a_cache_key_makes_no_replica_much_busier_than_the_others() -> None:
    places = RoutedReplica("a"), RoutedReplica("b")
    fleet, route, _ = fleet_of(*places)
    mine = key("k")
    first, second = sorted(places, key=lambda place: names(fleet, route, mine).index(place.name))
    first.load, second.load = 10, 6
    assert names(fleet, route, mine)[0] == first.name, "within a quarter of the mean"
    first.load = 14
    assert names(fleet, route, mine)[0] == second.name
    first.load = 3
    second.load = 2
    assert names(fleet, route, mine)[0] == first.name, "one request is no load"
    first.available = False
    assert names(fleet, route, mine)[0] == second.name


def test_upstreams_are_ordered_by_what_waits_for_them() -> None:
    places = RoutedReplica("a", load=9), RoutedReplica("b", load=2), RoutedReplica("c", load=1)
    fleet, route, _ = fleet_of(*places)
    assert names(fleet, route) == ["c", "b", "a"]


def test_what_failed_comes_last_for_a_while() -> None:
    bad, good = RoutedReplica("bad", 1000), RoutedReplica("good")
    fleet, route, clock = fleet_of(bad, good)
    report(fleet, bad, ok=False)
    assert names(fleet, route) == ["good", "bad"]
    clock.now = 0.99
    assert names(fleet, route) == ["good", "bad"]
    clock.now = 1.0
    assert names(fleet, route) == ["bad", "good"]


def test_a_replica_that_dies_with_many_requests_has_failed_once() -> None:
    bad = RoutedReplica("bad", 1000)
    fleet, route, clock = fleet_of(bad, RoutedReplica("good"))
    for _ in range(100):
        report(fleet, bad, ok=False)
    clock.now = 1.0
    assert names(fleet, route)[0] == "bad"


def test_each_failure_in_a_row_doubles_the_while_up_to_a_bound() -> None:
    bad = RoutedReplica("bad", 1000)
    fleet, route, clock = fleet_of(bad, RoutedReplica("good"))
    for expected_s in (1, 2, 4, 8, 16, COOL_DOWN_MAX_S, COOL_DOWN_MAX_S):
        report(fleet, bad, ok=False)
        start = clock.now
        clock.now = start + expected_s - 0.001
        assert names(fleet, route)[0] == "good"
        clock.now = start + expected_s
        assert names(fleet, route)[0] == "bad"
    for _ in range(1_100):
        report(fleet, bad, ok=False)
    clock.now += COOL_DOWN_MAX_S
    assert names(fleet, route)[0] == "bad"
    report(fleet, bad, ok=True)
    report(fleet, bad, ok=False)
    clock.now += 1.0
    assert names(fleet, route)[0] == "bad"


def test_what_is_away_comes_last() -> None:
    away = RoutedReplica("away", 1000)
    away.available = False
    fleet, route, _ = fleet_of(away, RoutedReplica("here"))
    assert names(fleet, route) == ["here", "away"]


async def test_start_and_close_reach_every_replica() -> None:
    places = [RoutedReplica("a"), RoutedReplica("b")]
    fleet, _, _ = fleet_of(*places)
    await fleet.start()
    await fleet.close()
    assert [place.calls for place in places] == [["start", "close"]] * 2


def test_a_drained_replica_is_asked_by_nobody() -> None:
    """Not even where all others fail; but where all are drained, they serve."""
    first, second = RoutedReplica("a"), RoutedReplica("b", load=9)
    fleet, route, _ = fleet_of(first, second)
    first.is_drained, second.available = True, False
    assert names(fleet, route) == names(fleet, route, key("chat 1")) == ["b"]
    second.is_drained = True
    assert sorted(names(fleet, route)) == ["a", "b"]
