"""Engines are placed within the bytes of devices, and stay where they are."""

from __future__ import annotations

from collections import Counter
from random import Random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.fleet.planner.placement import DeviceClaim, Placement, place_engines
from gateway.settings.planner import Device
from tests.budget import examples

GIB = 2**30
KINDS = ("cuda", "cpu")
Machine = tuple[list[DeviceClaim], list[Device]]


def claim(engine: str, gib: float, device: str | None = None, kind: str = "cuda") -> DeviceClaim:
    model = engine.partition("/")[0]
    return DeviceClaim(engine=engine, model=model, kind=kind, bytes=int(gib * GIB), device=device)


def cards(*gib: int) -> list[Device]:
    return [Device(name=f"cuda:{at}", bytes=each * GIB) for at, each in enumerate(gib)]


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    sizes = draw(st.lists(st.integers(0, 20), max_size=4))
    devices = [*cards(*sizes), Device(name="cpu", bytes=draw(st.integers(0, 20)) * GIB)]
    number = draw(st.integers(0, 8))
    claims = [
        claim(
            f"{draw(st.sampled_from('abc'))}/{at}",
            draw(st.integers(1, 12)),
            kind=draw(st.sampled_from(KINDS)),
        )
        for at in range(number)
    ]
    return claims, devices


def settled(claims: list[DeviceClaim], found: dict[str, Placement]) -> list[DeviceClaim]:
    return [msgspec.structs.replace(each, device=found[each.engine].device) for each in claims]


def places(found: dict[str, Placement]) -> dict[str, str | None]:
    return {name: each.device for name, each in found.items()}


def fits_by_first_fit(claims: list[DeviceClaim], devices: list[Device]) -> bool:
    free = {each.name: each.bytes for each in devices}
    for each in sorted(claims, key=lambda each: (-each.bytes, each.engine)):
        fitting = (name for name in free if name.startswith(each.kind) and free[name] >= each.bytes)
        if (device := next(fitting, None)) is None:
            return False
        free[device] -= each.bytes
    return True


@given(machine=machines(), order=st.randoms(use_true_random=False))
@settings(max_examples=examples(150))
def test_no_device_is_overfull_and_the_order_means_nothing(machine: Machine, order: Random) -> None:
    claims, devices = machine
    found = place_engines(claims, devices)
    taken: Counter[str] = Counter()
    for each in claims:
        device, reason = found[each.engine].device, found[each.engine].reason
        assert reason
        if device is not None:
            assert device.startswith(each.kind)
            taken[device] += each.bytes
    assert all(taken[each.name] <= each.bytes for each in devices)
    if fits_by_first_fit(claims, devices):
        assert None not in places(found).values()
    shuffled = order.sample(claims, len(claims))
    assert place_engines(shuffled, devices) == found


@given(machine=machines(), leaves=st.sets(st.integers(0, 7)))
@settings(max_examples=examples(150))
def test_what_runs_stays_when_others_come_and_go(machine: Machine, leaves: set[int]) -> None:
    claims, devices = machine
    before = settled(claims, place_engines(claims, devices))
    left = [each for at, each in enumerate(before) if at not in leaves]
    after = place_engines(left, devices)
    for each in left:
        if each.device is not None:
            assert after[each.engine] == Placement(each.device, "it runs there")
    assert places(place_engines(before, devices)) == {each.engine: each.device for each in before}


def test_replicas_of_a_model_are_apart_where_there_is_room() -> None:
    found = place_engines([claim("a/0", 4), claim("a/1", 4), claim("b/0", 2)], cards(16, 16))
    assert places(found) == {"a/0": "cuda:0", "a/1": "cuda:1", "b/0": "cuda:0"}
    assert found["a/1"].reason == (
        "it takes 4.00 GiB of 16.00 GiB that were free; cuda:0 had more engines of a"
    )


def test_replicas_share_a_device_where_others_need_the_room() -> None:
    claims = [claim("a/0", 4), claim("a/1", 4), claim("b/0", 3), claim("b/1", 3), claim("b/2", 2)]
    assert None not in places(place_engines(claims, cards(8, 8))).values()


def test_what_does_not_fit_is_said_with_what_is_free() -> None:
    found = place_engines([claim("a/0", 10, "cuda:0"), claim("b/0", 20)], cards(16, 16))
    assert found["b/0"] == Placement(
        None, "it takes 20.00 GiB; free are on cuda:0 6.00 GiB, cuda:1 16.00 GiB"
    )
    there_is_none = place_engines([claim("a/0", 1, kind="cpu")], cards(16))
    assert there_is_none["a/0"] == Placement(None, "there is no device of kind cpu")


def test_who_would_fit_after_a_start_anew_is_told_so_for_a_tenth_more() -> None:
    spread = [claim("a/0", 4, "cuda:0"), claim("a/1", 4, "cuda:1")]
    found = place_engines([*spread, claim("b/0", 14)], cards(16, 16))
    assert found["b/0"].device is None
    assert found["b/0"].reason.endswith("; it fits if all engines are started anew")
    assert found["a/0"] == Placement("cuda:0", "it runs there")
    large = [claim("a/0", 47, "cuda:0"), claim("c/0", 47, "cuda:1")]
    little = place_engines([*large, claim("b/0", 5)], cards(50, 50))
    assert little["b/0"].reason == "it takes 5.00 GiB; free are on cuda:0 3.00 GiB, cuda:1 3.00 GiB"


def test_an_engine_on_a_device_that_is_gone_takes_no_room_of_others() -> None:
    found = place_engines([claim("a/0", 10, "cuda:3"), claim("b/0", 10)], cards(16))
    assert places(found) == {"a/0": "cuda:3", "b/0": "cuda:0"}
