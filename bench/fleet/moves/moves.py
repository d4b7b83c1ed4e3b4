"""`bench.fleet moves`: what it brings that requests which wait at one replica move to another one.

A replica joins others at which a burst of requests waits, becomes slow without saying so, or hangs;
or nothing happens to any, near saturation and beyond it. Each case runs on the same traces with
moves and without. Behind a mean stands how far it is from another one by chance.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import fmean, pstdev

import msgspec

from bench.fleet.goals import FleetGoal, tell
from bench.fleet.moves.moving_world import MovingRouter, MovingWorld, Trouble
from bench.fleet.overload import SLO
from bench.fleet.report import limit_by_length
from bench.fleet.routers import gpu_cost, parser_of, traces_of
from bench.fleet.trace import CONVERSATION, TracedRequest
from bench.fleet.world import FleetSetup
from bench.sim.report import percentile
from gateway.lanes import Slo

BURST_AT_S, BURST_S, BURST_TIMES = 100.0, 30.0, 4.0
NO_TROUBLE = Trouble()


class MovesCase(msgspec.Struct, frozen=True, kw_only=True):
    """A case. `from_s`, `until_s`: the requests that came then are reported."""

    name: str
    speed: float
    trouble: Trouble = NO_TROUBLE
    num_replicas: int = 8
    num_requests: int = 2_000
    has_burst: bool = False
    slo: Slo | None = None
    """The objective: a request that would miss it is refused; None: none is."""
    from_s: float = 0.0
    until_s: float = float("inf")


AFTER_BURST = MovesCase(
    name="joins after a burst",
    speed=1.0,
    trouble=Trouble(joins_s=150.0),
    num_replicas=4,
    num_requests=1_000,
    has_burst=True,
    from_s=100.0,
    until_s=200.0,
)
SLOW = Trouble(slow_from_s=200.0, slow_until_s=230.0, times_slower=30.0)
LESS_SLOW = Trouble(slow_from_s=200.0, slow_until_s=220.0, times_slower=10.0)
HANGS = Trouble(hangs_from_s=200.0, hangs_until_s=210.0)
CASES = (
    AFTER_BURST,
    msgspec.structs.replace(
        AFTER_BURST, name="joins early", speed=0.7, trouble=Trouble(joins_s=135.0)
    ),
    MovesCase(name="30 times slower", speed=2.0, trouble=SLOW, from_s=190.0, until_s=240.0),
    MovesCase(name="10 times slower", speed=2.0, trouble=LESS_SLOW, from_s=190.0, until_s=240.0),
    MovesCase(name="hangs for 10 s", speed=2.0, trouble=HANGS, from_s=190.0, until_s=230.0),
    MovesCase(name="nothing, near saturation", speed=3.0, num_requests=4_000),
    MovesCase(name="overload, refusing", speed=4.0, num_requests=4_000, slo=SLO),
)


class MovesResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one run: seconds to first tokens, shares of all requests."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    most_s: float
    good: float
    moved: float


def with_burst(requests: Sequence[TracedRequest]) -> list[TracedRequest]:
    """Return a trace of which a part comes BURST_TIMES as fast."""
    played = []
    for each in requests:
        at_s = each.arrival_s
        if at_s > BURST_AT_S:
            soonest_s = BURST_AT_S + (at_s - BURST_AT_S) / BURST_TIMES
            at_s = max(soonest_s, at_s - (BURST_TIMES - 1) * BURST_S)
        played.append(msgspec.structs.replace(each, arrival_s=at_s))
    return played


def run(case: MovesCase, requests: Sequence[TracedRequest], *, moves: bool) -> MovesResult:
    setup = FleetSetup(cost=gpu_cost(), num_replicas=case.num_replicas)
    played = [
        msgspec.structs.replace(each, arrival_s=each.arrival_s / case.speed)
        for each in requests[: case.num_requests]
    ]
    world = MovingWorld(setup, case.trouble)
    router = MovingRouter(world, random.Random(1), case.slo, moves=moves)
    fates = world.run(with_burst(played) if case.has_burst else played, router)
    asked = [each for each in fates if case.from_s <= each.asked.arrival_s < case.until_s]
    served = [each for each in asked if not each.was_refused]
    limit_s = limit_by_length(SLO, setup.cost, setup.max_step_tokens)
    good = sum(each.ttft_s <= limit_s(each) and each.tpot_s <= SLO.tpot_s for each in served)
    firsts = [each.ttft_s for each in served]
    return MovesResult(
        mean_s=fmean(firsts),
        p50_s=percentile(firsts, 0.5),
        p90_s=percentile(firsts, 0.9),
        p99_s=percentile(firsts, 0.99),
        most_s=max(firsts),
        good=good / len(asked),
        moved=router.num_moved,
    )


def mean_of(results: Sequence[MovesResult]) -> MovesResult:
    names = MovesResult.__struct_fields__
    return MovesResult(**{name: fmean(getattr(each, name) for each in results) for name in names})


def line_of(results: Sequence[MovesResult]) -> str:
    mean, by_chance_s = mean_of(results), pstdev([each.mean_s for each in results])
    return (
        f"{mean.mean_s:7.3f} +-{by_chance_s / len(results) ** 0.5:6.3f} {mean.p50_s:7.3f}"
        f" {mean.p90_s:6.2f} {mean.p99_s:6.2f} {mean.most_s:6.1f} {mean.good:6.3f}"
        f" {mean.moved:6.0f}"
    )


def main(command: str, arguments: list[str]) -> int:
    parser = parser_of(command, __doc__ or "")
    parser.set_defaults(speed=1.0, seeds=12)
    traces = traces_of(parser.parse_args(arguments), CONVERSATION)
    found: dict[tuple[str, bool], list[MovesResult]] = {}
    print(f"{'first tokens, s':<32}   mean             p50    p90    p99    max   good  moved")
    for case in CASES:
        for moves in (False, True):
            results = [run(case, each, moves=moves) for each in traces]
            found[case.name, moves] = results
            head = f"{case.name}, {'moving' if moves else 'staying'}"
            print(f"{head:<32} {line_of(results)}", flush=True)
    joins = AFTER_BURST.name
    moved, stayed = mean_of(found[joins, True]), mean_of(found[joins, False])
    return tell(
        [
            FleetGoal(
                name="-",
                text="p90 of first tokens where a replica joins, over that without moves",
                reached=moved.p90_s / stayed.p90_s,
                wanted=1.0,
                at_most=True,
            )
        ]
    )
