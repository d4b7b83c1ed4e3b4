"""`bench.fleet planner`: how many replicas a planner keeps through a spike, and how many requests
meet their objective.

The trace is played so that for some minutes as many times more comes. The shipped planner (its
forecast, sizing and decision) is held against numbers that never change, against Kubernetes'
autoscaler with the target that hindsight finds best, and against one who knows the trace. That one
has replicas as busy as they may be for as many requests to meet their objective; it is the measure
of replica-hours. Whatever takes up a device counts, also while it starts and while it drains.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import msgspec

from bench.fleet.goals import FleetGoal, tell
from bench.fleet.planner.scaled_world import ScaledSetup, ScaledWorld, Scaler
from bench.fleet.planner.scalers import (
    Clairvoyant,
    FixedNumber,
    ReactiveScaler,
    ShippedPlanner,
)
from bench.fleet.report import limit_by_length
from bench.fleet.routers import gpu_cost, parser_of, traces_of
from bench.fleet.trace import CONVERSATION, TracedRequest, TraceError
from gateway.fleet.planner.decision import PoolBounds
from gateway.lanes import Slo
from gateway.settings.planner import PlannerConfig

SLO = Slo(ttft_s=1.0, ttft_per_prefill=2.0, tpot_s=0.05)
MET, MOST_HOURS = 0.95, 1.2
SPIKE_AT = 0.4
"""The spike begins after this part of the trace."""
BUSY = tuple(at / 100 for at in (*range(64, 44, -2), *range(44, 8, -4)))
"""How busy replicas of who knows the trace may be: it takes the first of these that will do."""
TARGETS = (6.0, 8.0, 12.0, 16.0)
"""Requests in flight for each replica that the autoscaler aims at: the same."""
WINDOW_S = 60.0
KNOWING, PLANNER = "who knows the trace", "planner"


class ScalingResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one run. Shares are of all requests."""

    met: float
    refused: float
    late: float
    slow: float
    hours: float
    most: int
    starts: int

    @staticmethod
    def of(world: ScaledWorld) -> ScalingResult:
        fates, setup = world.fates, world.scaled
        limit_s = limit_by_length(setup.slo, setup.cost, setup.max_step_tokens)
        served = [each for each in fates if not each.was_refused]
        late = sum(each.ttft_s > limit_s(each) for each in served)
        in_time = [each for each in served if each.ttft_s <= limit_s(each)]
        slow = sum(each.tpot_s > setup.slo.tpot_s for each in in_time)
        return ScalingResult(
            met=(len(in_time) - slow) / len(fates),
            refused=1 - len(served) / len(fates),
            late=late / len(fates),
            slow=slow / len(fates),
            hours=world.replica_s / 3600,
            most=world.most_there,
            starts=len(world.stays) - setup.num_replicas,
        )


def with_spike(
    requests: Sequence[TracedRequest], times: float, spike_s: float
) -> list[TracedRequest]:
    """Return a trace of which a part is played so many times as fast, for so long."""
    begin_s = SPIKE_AT * requests[-1].arrival_s
    played = []
    for each in requests:
        at_s = each.arrival_s
        if at_s > begin_s:
            at_s = max(begin_s + (at_s - begin_s) / times, at_s - (times - 1) * spike_s)
        played.append(msgspec.structs.replace(each, arrival_s=at_s))
    return played


def run(
    requests: Sequence[TracedRequest], setup: ScaledSetup, scaler: Scaler, begin: int
) -> ScalingResult:
    world = ScaledWorld(msgspec.structs.replace(setup, num_replicas=begin))
    world.run_scaled(requests, scaler)
    return ScalingResult.of(world)


def cheapest(results: Sequence[ScalingResult]) -> ScalingResult:
    """Return the cheapest of those that meet the objective; where none does, the one that is the
    nearest to it."""
    good = [each for each in results if each.met >= MET]
    return min(good, key=lambda each: each.hours, default=max(results, key=lambda each: each.met))


def run_knowing(requests: Sequence[TracedRequest], setup: ScaledSetup) -> tuple[ScalingResult, int]:
    """Return what one who knows the trace makes of it, and with how many replicas it begins."""
    for busy in BUSY:
        knowing = Clairvoyant(requests, setup, WINDOW_S, busy)
        begin = knowing.number(0.0)
        found = run(requests, setup, knowing, begin)
        if found.met >= MET:
            break
    return found, begin


def compare(
    requests: Sequence[TracedRequest], setup: ScaledSetup, bounds: PoolBounds
) -> dict[str, ScalingResult]:
    """Return what each scaler makes of a trace. All begin with as many replicas, but for those
    that keep their number."""
    known, begin = run_knowing(requests, setup)

    def of(scaler: Scaler) -> ScalingResult:
        return run(requests, setup, scaler, begin)

    def fixed(number: int) -> ScalingResult:
        return run(requests, setup, FixedNumber(number), number)

    planner = ShippedPlanner(bounds, begin)
    found = {
        KNOWING: known,
        PLANNER: of(planner),
        "planner, a day later": of(ShippedPlanner(bounds, begin, planner.watch.learnt)),
        "autoscaler, best target": cheapest([of(ReactiveScaler(each)) for each in TARGETS]),
    }
    mean = max(1, round(3600 * found[PLANNER].hours / requests[-1].arrival_s))
    found["fixed, planner's mean"] = fixed(mean)
    enough = found["fixed, planner's mean"]
    for number in range(mean + 1, setup.most + 1):
        if enough.met >= MET:
            break
        enough = fixed(number)
    found["fixed, enough"] = enough
    return found


def main(command: str, arguments: list[str]) -> int:
    defaults = PlannerConfig()
    parser = parser_of(command, __doc__ or "")
    parser.set_defaults(speed=1.0)
    parser.add_argument("--times", type=float, default=3.0, help="how much more the spike is")
    parser.add_argument("--spike", type=float, default=300.0, help="for so many seconds")
    parser.add_argument("--start", type=float, default=30.0, help="seconds that a replica starts")
    parser.add_argument("--cooldown", type=float, default=defaults.cooldown_s, help="seconds")
    parser.add_argument(
        "--target", type=float, default=MET, help="`[slo] target`: the share that is to meet it"
    )
    asked = parser.parse_args(arguments)
    setup = ScaledSetup(cost=gpu_cost(), slo=SLO, start_s=asked.start)
    bounds = PoolBounds(
        least=1,
        most=setup.most,
        slo=SLO,
        target=asked.target,
        cooldown_s=asked.cooldown,
        idle_s=defaults.idle_s,
    )
    traces = traces_of(asked, CONVERSATION)
    if not all(each[-1].arrival_s for each in traces):
        raise TraceError(f"{asked.trace or 'the trace'}: all requests come at once")
    runs = [compare(with_spike(each, asked.times, asked.spike), setup, bounds) for each in traces]
    print(f"{'':<24} objective met (worst)  refused   late   slow  hours  x most starts")
    for name in runs[0]:
        print(f"{name:<24} {line_of([each[name] for each in runs], [e[KNOWING] for e in runs])}")
    return tell(
        [
            FleetGoal(
                name="G10",
                text="requests that meet their objective",
                reached=fmean(each[PLANNER].met for each in runs),
                wanted=MET,
            ),
            FleetGoal(
                name="G10",
                text="replica-hours over those of who knows the trace",
                reached=fmean(each[PLANNER].hours / each[KNOWING].hours for each in runs),
                wanted=MOST_HOURS,
                at_most=True,
            ),
        ]
    )


def line_of(found: Sequence[ScalingResult], knowing: Sequence[ScalingResult]) -> str:
    def mean(name: str) -> float:
        return fmean(float(getattr(each, name)) for each in found)

    times = fmean(one.hours / other.hours for one, other in zip(found, knowing, strict=True))
    return (
        f"{mean('met'):13.1%} ({min(each.met for each in found):6.1%})"
        f" {mean('refused'):8.1%} {mean('late'):6.1%} {mean('slow'):6.1%}"
        f" {mean('hours'):6.2f} {times:5.2f} {mean('most'):4.0f} {mean('starts'):6.0f}"
    )
