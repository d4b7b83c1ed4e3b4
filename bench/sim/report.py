"""Report what an outcome is worth: per lane, and between tenants.

Only what arrived before the horizon counts. What had no first token by then has waited for so long
at least, and counts as that; what was refused has not waited, and keeps no SLO.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from typing import Final, TypeVar

import msgspec

from bench.sim.world import Fate, Outcome
from engine.fairness import INPUT_COST, LANE_WEIGHTS, OUTPUT_COST
from engine.protocol import Lane

K = TypeVar("K", bound=Hashable)


class Slo(msgspec.Struct, frozen=True):
    ttft_s: float
    tpot_s: float


SLOS: Final[Mapping[Lane, Slo]] = {
    "interactive": Slo(1.0, 0.1),
    "agentic": Slo(5.0, 0.2),
    "batch": Slo(600.0, 1.0),
}


class LaneReport(msgspec.Struct, frozen=True):
    requests: int
    refused: int
    done: int
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    itl_p99_s: float
    """The p99 of the time between tokens, over all tokens."""
    goodput_per_s: float
    """Requests done within their SLO."""
    goodput: float
    """The share of requests that kept the objective, among those for which it was known at the
    end."""


class Report(msgspec.Struct, frozen=True):
    lanes: dict[Lane, LaneReport]
    jain: float
    """Jain's index of each tenant's service over its max-min fair share."""
    utilisation: float
    steps: int
    preemptions: int


def report(outcome: Outcome) -> Report:
    by_lane: dict[Lane, list[Fate]] = {}
    for lane in LANE_WEIGHTS:
        fates = [fate for fate in outcome.fates if fate.session.lane == lane]
        if fates:
            by_lane[lane] = fates
    return Report(
        lanes={
            lane: _lane(fates, outcome.gaps_s[lane], SLOS[lane], outcome)
            for lane, fates in by_lane.items()
        },
        jain=_fairness(outcome.fates),
        utilisation=outcome.busy_s / outcome.horizon_s,
        steps=outcome.num_steps,
        preemptions=outcome.num_preemptions,
    )


def moved(lane: Lane, beside: Report, without: Report) -> dict[str, float]:
    """How many times as long it takes from token to token in a lane."""
    by, than = beside.lanes[lane], without.lanes[lane]
    return {
        name: getattr(by, name) / getattr(than, name)
        for name in ("tpot_p50_s", "tpot_p99_s", "itl_p99_s")
    }


def percentile(values: Iterable[float], part: float) -> float:
    """The smallest that so many are not above; 0 of none."""
    ranked = sorted(values)
    if not ranked:
        return 0.0
    return ranked[max(0, -int(-part * len(ranked) // 1) - 1)]


def _lane(fates: list[Fate], gaps_s: Iterable[float], slo: Slo, outcome: Outcome) -> LaneReport:
    end_s = outcome.horizon_s
    waits = [(end_s if f.first_s is None else f.first_s) - f.arrival_s for f in fates]
    ttft = [wait_s for f, wait_s in zip(fates, waits, strict=True) if not f.was_refused]
    tpot = [_tpot_s(fate) for fate in fates if fate.said > 1]
    verdicts = [_is_good(fate, slo, wait_s) for fate, wait_s in zip(fates, waits, strict=True)]
    good, judged = verdicts.count(True), len(verdicts) - verdicts.count(None)
    return LaneReport(
        requests=len(fates),
        refused=sum(fate.was_refused for fate in fates),
        done=sum(fate.is_done for fate in fates),
        ttft_p50_s=percentile(ttft, 0.5),
        ttft_p99_s=percentile(ttft, 0.99),
        tpot_p50_s=percentile(tpot, 0.5),
        tpot_p99_s=percentile(tpot, 0.99),
        itl_p99_s=percentile(gaps_s, 0.99),
        goodput_per_s=good / end_s,
        goodput=good / judged if judged else 0.0,
    )


def _tpot_s(fate: Fate) -> float:
    assert fate.first_s is not None, "it has said something"
    return (fate.last_s - fate.first_s) / (fate.said - 1)


def _is_good(fate: Fate, slo: Slo, wait_s: float) -> bool | None:
    """Whether it kept its SLO; None: it is not done, and may. wait_s: its TTFT, or so far."""
    if fate.was_refused or wait_s > slo.ttft_s:
        return False
    if not fate.is_done:
        return None
    return fate.said == 1 or _tpot_s(fate) <= slo.tpot_s


def _fairness(fates: list[Fate]) -> float:
    served: dict[tuple[Lane, str], float] = defaultdict(float)
    asked: dict[tuple[Lane, str], float] = defaultdict(float)
    for fate in fates:
        who, turn = (fate.session.lane, fate.session.tenant), fate.asked
        served[who] += INPUT_COST * fate.num_computed + OUTPUT_COST * fate.said
        asked[who] += INPUT_COST * (turn.prompt - fate.cached) + OUTPUT_COST * turn.answer
    shares = fair_shares(asked, sum(served.values()))
    return jain([served[who] / share for who, share in shares.items() if share > 0])


def fair_shares(
    asked: Mapping[tuple[Lane, str], float], total: float
) -> dict[tuple[Lane, str], float]:
    """Share `total` among the lanes by their weights, then among the tenants of each, alike; nobody
    has more than asked."""
    of_lane: dict[Lane, float] = defaultdict(float)
    for (lane, _), amount in asked.items():
        of_lane[lane] += amount
    shares: dict[tuple[Lane, str], float] = {}
    for lane, room in max_min(of_lane, LANE_WEIGHTS, total).items():
        tenants = {who: amount for who, amount in asked.items() if who[0] == lane}
        shares |= max_min(tenants, dict.fromkeys(tenants, 1), room)
    return shares


def max_min(asked: Mapping[K, float], weights: Mapping[K, float], total: float) -> dict[K, float]:
    """`total` by weight; what one does not want goes to the others, by weight."""
    shares: dict[K, float] = {}
    left = sorted(asked, key=lambda key: asked[key] / weights[key])
    for number, key in enumerate(left):
        weight = sum(weights[other] for other in left[number:])
        shares[key] = min(asked[key], total * weights[key] / weight)
        total -= shares[key]
    return shares


def jain(values: list[float]) -> float:
    """(Jain, Chiu, Hawe 1984): 1 when all are alike, 1/n when one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0
