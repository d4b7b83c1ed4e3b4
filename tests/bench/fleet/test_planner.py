"""The simulation of replicas that come and go, with the planner that is shipped."""

from __future__ import annotations

import pytest

from bench.fleet.planner.planner import SLO, run, with_spike
from bench.fleet.planner.scaled_world import ScaledSetup
from bench.fleet.planner.scalers import Clairvoyant, FixedNumber, ShippedPlanner
from bench.fleet.routers import gpu_cost
from bench.fleet.trace import CONVERSATION, TracedRequest, make_trace
from gateway.fleet.planner.decision import PoolBounds

SETUP = ScaledSetup(cost=gpu_cost(), slo=SLO, start_s=20.0)
BOUNDS = PoolBounds(least=1, most=SETUP.most, slo=SLO, target=0.95)
BEGIN = 4


@pytest.fixture(scope="module")
def spiky() -> list[TracedRequest]:
    return with_spike(make_trace(CONVERSATION, 1)[:2_000], 3.0, 100.0)


def test_a_spike_brings_as_many_times_more_for_so_long(spiky: list[TracedRequest]) -> None:
    plain = make_trace(CONVERSATION, 1)[:2_000]
    assert spiky[-1].arrival_s == pytest.approx(plain[-1].arrival_s - 200)
    begin_s = 0.4 * plain[-1].arrival_s
    spike = sum(begin_s < each.arrival_s <= begin_s + 100 for each in spiky)
    assert spike == sum(begin_s < each.arrival_s <= begin_s + 300 for each in plain)
    arrivals = [each.arrival_s for each in spiky]
    assert arrivals == sorted(arrivals)


def test_the_planner_follows_a_spike_that_a_fixed_number_does_not(
    spiky: list[TracedRequest],
) -> None:
    fixed = run(spiky, SETUP, FixedNumber(BEGIN), BEGIN)
    assert fixed.hours == pytest.approx(BEGIN * spiky[-1].arrival_s / 3600)
    assert (fixed.most, fixed.starts) == (BEGIN, 0)
    planned = run(spiky, SETUP, ShippedPlanner(BOUNDS, BEGIN), BEGIN)
    assert planned.most >= 2 * BEGIN and planned.met > fixed.met + 0.05


def test_who_knows_the_trace_has_what_it_wants_when_it_comes(spiky: list[TracedRequest]) -> None:
    knowing = Clairvoyant(spiky, SETUP, 60.0, 0.5)
    begin_s = 60 * (spiky[-1].arrival_s * 0.55 // 60)
    assert knowing.number(begin_s - SETUP.start_s) >= knowing.number(begin_s) > 1
