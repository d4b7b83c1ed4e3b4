"""Packing keeps to the room there is, and leaves what runs where it is needed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.fleet.planner.packing import Footprint, PoolClaim, pack
from tests.budget import examples

GIB = 2**30


def claim(model: str, gib: float, needed: int, resident: int = 0, **more: float) -> PoolClaim:
    return PoolClaim(
        model=model,
        each=Footprint(int(gib * GIB), more.get("threads", 0.0)),
        least=int(more.get("least", 0)),
        needed=needed,
        wanted=max(needed, int(more.get("wanted", 0))),
        resident=resident,
        load=more.get("load", 0.0),
    )


@st.composite
def claims(draw: st.DrawFn) -> list[PoolClaim]:
    number = draw(st.integers(1, 5))
    found = []
    for at in range(number):
        least, needed = draw(st.integers(0, 1)), draw(st.integers(0, 5))
        size = draw(st.integers(1, 8))
        more = {"least": least, "wanted": needed + draw(st.integers(0, 3))}
        made = claim(str(at), size, max(least, needed), draw(st.integers(0, 6)), **more)
        found.append(made)
    return found


@given(found=claims(), gib=st.integers(0, 64))
@settings(max_examples=examples(200))
def test_what_is_given_is_wanted_and_fits(found: list[PoolClaim], gib: int) -> None:
    given_ = pack(found, Footprint(gib * GIB, 1e9))
    taken = least = 0
    for each in found:
        got = given_[each.model]
        assert each.least <= got.replicas <= max(each.least, each.wanted)
        taken += got.replicas * each.each.bytes
        least += each.least * each.each.bytes
    assert taken <= max(gib * GIB, least)


def test_a_model_that_is_asked_for_takes_the_room_of_one_that_is_not() -> None:
    warm = claim("warm", 6, needed=0, resident=1, wanted=1)
    asked = claim("asked", 6, needed=1)
    found = pack([warm, asked], Footprint(8 * GIB, 4))
    assert (found["warm"].replicas, found["asked"].replicas) == (0, 1)
    assert found["warm"].problem == "it takes 6.00 GiB, 2.00 are free"


def test_what_runs_and_is_needed_is_not_ended_for_growth() -> None:
    there = claim("there", 4, needed=2, resident=2, load=0.1)
    grows = claim("grows", 4, needed=4, resident=1, load=9.0)
    found = pack([there, grows], Footprint(16 * GIB, 4))
    assert (found["there"].replicas, found["grows"].replicas) == (2, 2)


def test_growth_goes_to_the_busiest_and_stops_at_the_processors() -> None:
    calm = claim("calm", 1, needed=3, resident=1, load=1.0, threads=1.0)
    busy = claim("busy", 1, needed=3, resident=1, load=5.0, threads=1.0)
    found = pack([calm, busy], Footprint(64 * GIB, 4))
    assert (found["calm"].replicas, found["busy"].replicas) == (1, 3)
    assert found["calm"].problem == "it takes 1.0 processors, 0.0 are idle"
