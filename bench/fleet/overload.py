"""`bench.fleet overload`: what is refused, and what is served in time, where more comes than can be
computed.

The objective grows with the prompt: a second, and twice what it would take an idle replica. Where
it is the same for all, those that are refused are the long prompts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from bench.fleet.anchors import ANCHORS
from bench.fleet.goals import FleetGoal, tell
from bench.fleet.ours import PredictedTime
from bench.fleet.report import FleetReport, limit_by_length, report
from bench.fleet.routers import (
    HEAD,
    OURS,
    MakeRouter,
    faster,
    gpu_cost,
    line_of,
    mean_of,
    parser_of,
    traces_of,
)
from bench.fleet.trace import CONVERSATION, TracedRequest
from bench.fleet.world import FleetSetup, FleetWorld, Router
from gateway.lanes import Slo

SLO = Slo(ttft_s=1.0, ttft_per_prefill=2.0, tpot_s=0.05)
FIXED = Slo(ttft_s=2.0, tpot_s=0.05)
"""The same limit for every prompt, for comparison."""
LEAST = "least loaded"
GOOD = 0.9
"""Capacity is the speed up to which so many requests are good."""
SPEEDS = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)


def refusing(world: FleetWorld, rng: random.Random) -> Router:
    return PredictedTime(world, rng, SLO)


def refusing_by_one_limit(world: FleetWorld, rng: random.Random) -> Router:
    return PredictedTime(world, rng, FIXED)


def run(requests: Sequence[TracedRequest], setup: FleetSetup, make: MakeRouter) -> FleetReport:
    world = FleetWorld(setup)
    fates = world.run(requests, make(world, random.Random(1)))
    limit = limit_by_length(SLO, setup.cost, setup.max_step_tokens)
    return report(world, fates, limit, SLO.tpot_s)


def capacity(reports: dict[float, FleetReport]) -> float:
    """Return the speed at which the good ones fall to GOOD: on a straight line between two."""
    speeds = sorted(reports)
    for below, above in zip(speeds, speeds[1:], strict=False):
        good, less = reports[below].goodput, reports[above].goodput
        if good >= GOOD > less:
            return below + (above - below) * (good - GOOD) / (good - less)
    return speeds[-1] if reports[speeds[-1]].goodput >= GOOD else speeds[0]


def main(command: str, arguments: list[str]) -> int:
    parser = parser_of(command, __doc__ or "")
    parser.set_defaults(speed=1.0, seeds=1)
    asked = parser.parse_args(arguments)
    setup = FleetSetup(cost=gpu_cost())
    makers: dict[str, MakeRouter] = {
        LEAST: ANCHORS[LEAST],
        "Dynamo cost": ANCHORS["Dynamo cost"],
        "llm-d 3:2:2": ANCHORS["llm-d 3:2:2"],
        "one limit": refusing_by_one_limit,
        OURS: refusing,
    }
    traces = traces_of(asked, CONVERSATION)
    found: dict[str, dict[float, FleetReport]] = {name: {} for name in makers}
    for speed in SPEEDS:
        print(f"x{speed:g}:\n  {'':<18} {HEAD}  refused tokens")
        for name, make in makers.items():
            runs = [run(faster(each, speed), setup, make) for each in traces]
            each = found[name][speed] = mean_of(runs)
            print(f"  {name:<18} {line_of(each)} {each.refused_tokens:8.1%}", flush=True)
    capacities = {name: capacity(reports) for name, reports in found.items()}
    print("capacity, times the trace's speed:", msgspec.json.encode(capacities).decode())
    ours = found[OURS]
    most = max(SPEEDS, key=lambda speed: ours[speed].refused)
    refused = ours[most]
    return tell(
        [
            FleetGoal(
                name="G2",
                text=f"capacity over that of {LEAST}",
                reached=capacities[OURS] / capacities[LEAST],
                wanted=1.4,
            ),
            FleetGoal(
                name="G9",
                text=f"the share of tokens refused over that of requests, x{most:g}",
                reached=refused.refused_tokens / refused.refused if refused.refused else 0.0,
                wanted=1.3,
                at_most=True,
            ),
            FleetGoal(
                name="G9",
                text=f"p90 of the error of predictions, x{most:g}",
                reached=refused.error_p90 or 0.0,
                wanted=0.3,
                at_most=True,
            ),
        ]
    )
