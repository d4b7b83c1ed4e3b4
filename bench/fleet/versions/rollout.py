"""`bench.fleet rollout`: how soon a version that refuses more is taken back, and how often one that
does not.

Organizations of different sizes send requests, which end at random as either version has them end,
and the shipped rollout looks at them. A/B: the new version refuses 5 percentage points more. A/A:
it is the same one; organizations are alike, or each regard has odds of its own for each, which may
drift for all, or a few of them send most requests.

The bound is what the best test of one look could do: the power of Fisher's exact test, made random
to use all of its error, after 500 requests of the new version and what the others sent meanwhile.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.fleet.goals import FleetGoal, tell
from bench.sim.report import percentile
from gateway.registry.comparison import ALPHA, REGARDS, WEIGHTS, Outcomes
from gateway.registry.evidence import HORIZON, log_choose
from gateway.registry.rollout import ALL, WATCHED, ModelRollout, look

BASELINES = (0.0, 0.01, 0.02, 0.05)
SHARES = (5, 25, 50)
MORE = 0.05
OTHERS = (0.005, 0.002, 0.1, 0.03)
"""The shares of both versions in the other regards."""
MOST = 2000
"""Requests of the new version in an A/A run."""
NUM_ORGANIZATIONS, EVENNESS = 200, 0.8
NUM_LARGE, LARGE_PART = 5, 0.6
DRIFT, DRIFT_REQUESTS = 0.7, 20_000
"""The odds of all go up and down by so much (in the logarithm), within so many requests."""
PER_LOOK = 40
"""Requests that end between two looks; in A/A runs ten times as many at the smallest share."""
WATCH = 500
NEVER = math.inf
WITHIN, MOST_ALARMS = 0.95, 0.01
Counts = NDArray[np.int64]


class Kind(NamedTuple):
    """How organizations differ. `spread`: the standard deviation of the log odds of each regard;
    `beta`: or their shares are of a beta distribution with so many requests before."""

    name: str
    spread: float = 0.0
    beta: float = 0.0
    has_large: bool = False
    drifts: bool = False


ALIKE = Kind("alike")
UNLIKE = (
    Kind("spread 0.3", spread=0.3),
    Kind("spread 0.6", spread=0.6),
    Kind("spread 1.0", spread=1.0),
    Kind("beta of 20", beta=20),
    Kind("0.6, 5 large", spread=0.6, has_large=True),
    Kind("0.6, drifts", spread=0.6, drifts=True),
)


class Run(NamedTuple):
    """`percent`: of the organizations that get the new version; `most`: of its requests."""

    seed: int
    baseline: float
    more: float = 0.0
    percent: int = 5
    kind: Kind = ALIKE
    watch: int = WATCH
    most: int = MOST
    per_look: int = PER_LOOK


class Traffic:
    """Sends requests of organizations and has them end at random."""

    def __init__(self, run: Run) -> None:
        self._rng = rng = np.random.default_rng(run.seed)
        self._kind = kind = run.kind
        sizes = np.arange(1, NUM_ORGANIZATIONS + 1) ** -EVENNESS
        if kind.has_large:
            sizes = np.full(NUM_ORGANIZATIONS, (1 - LARGE_PART) / (NUM_ORGANIZATIONS - NUM_LARGE))
            sizes[:NUM_LARGE] = LARGE_PART / NUM_LARGE
        groups = rng.integers(0, ALL, NUM_ORGANIZATIONS)
        groups[rng.integers(NUM_ORGANIZATIONS)] = 0  # somebody has the new version
        weights = np.bincount(groups, sizes, ALL)
        self._weights = weights / weights.sum()
        shares = np.stack([self._drawn(share) for share in (run.baseline, *OTHERS)])
        self._shares = np.stack(
            [np.bincount(groups, sizes * each, ALL) / np.maximum(weights, 1e-12) for each in shares]
        )
        """By regard and group."""
        self._phase = rng.uniform(0, 2 * math.pi)
        self._sent = 0

    def _drawn(self, share: float) -> NDArray[np.float64]:
        """Return the shares of the organizations, about one."""
        if self._kind.beta:
            of_beta = (share * self._kind.beta, (1 - share) * self._kind.beta)
            return self._rng.beta(*of_beta, NUM_ORGANIZATIONS)
        gaps = self._kind.spread * self._rng.standard_normal(NUM_ORGANIZATIONS)
        return with_gap(np.full(NUM_ORGANIZATIONS, max(share, 1e-12)), gaps)

    def send(self, requests: int, more: NDArray[np.float64]) -> Counts:
        """Return what ended by group: the requests, and those of each regard. `more`: are refused
        of each group's."""
        self._sent += requests
        shares = self._shares
        if self._kind.drifts:
            turn = 2 * math.pi * self._sent / DRIFT_REQUESTS
            shares = with_gap(shares, DRIFT * math.sin(turn + self._phase))
        sent = self._rng.multinomial(requests, self._weights)
        refused = self._rng.binomial(sent, np.minimum(shares[0] + more, 1.0))
        return np.stack([sent, refused, *self._rng.binomial(sent, shares[1:])])


def with_gap(shares: NDArray[np.float64], gap: NDArray[np.float64] | float) -> NDArray[np.float64]:
    odds = shares / (1 - shares) * np.exp(gap)
    return np.asarray(odds / (1 + odds))


def taken_back_after(run: Run) -> float:
    """Return after how many of its requests a version is taken back; NEVER: not within `most`."""
    traffic = Traffic(run)
    rollout = ModelRollout(
        id="mrol_1",
        operator_org="org_1",
        model="m",
        from_version=1,
        to_version=2,
        steps=(run.percent,),
        least=1,
        watch=run.watch,
        step=WATCHED if run.watch else 0,
        created_at=datetime.now(UTC),
    )
    seen: dict[int, dict[int, Outcomes]] = {}
    while rollout.is_active:
        is_watched = rollout.step == WATCHED
        if not is_watched and rollout.progress.new.requests >= run.most:
            break
        more = np.where(np.arange(ALL) < rollout.percent, run.more, 0.0)
        ended = traffic.send(run.watch * 4 if is_watched else run.per_look, more)
        groups = seen.setdefault(rollout.step, {})
        for group in np.flatnonzero(ended[0]).tolist():
            requests, *counts = ended[:, group].tolist()
            found = Outcomes(requests=requests, **dict(zip(REGARDS, counts, strict=True)))
            groups.setdefault(group, Outcomes()).add(found)
        rollout = look(rollout, seen)
    return NEVER if rollout.is_active else rollout.progress.new.requests


def bound(baseline: float, percent: int, more: float, error: float) -> float:
    """Return the power of the best test of one look at HORIZON requests of the new version."""
    old = round(HORIZON * (ALL - percent) / percent)
    rng = np.random.default_rng(0)
    new_so = rng.binomial(HORIZON, baseline + more, 4000)
    so = new_so + rng.binomial(old, baseline, 4000)
    powers = [
        rejects(int(of_new), int(of_both), old, error)
        for of_new, of_both in zip(new_so, so, strict=True)
    ]
    return sum(powers) / len(powers)


def rejects(new_so: int, so: int, old: int, error: float) -> float:
    """Return with what probability Fisher's test rejects, which draws where it is at its bound."""
    everything = log_choose(HORIZON + old, so)
    tail = 0.0
    for at in range(min(so, HORIZON), -1, -1):
        here = math.exp(log_choose(HORIZON, at) + log_choose(old, so - at) - everything)
        if tail + here > error:
            return 1.0 if new_so > at else (error - tail) / here if new_so == at else 0.0
        tail += here
    return 1.0


def each_after(runs: Iterable[Run], jobs: int) -> list[float]:
    with ProcessPoolExecutor(jobs) as pool:
        return list(pool.map(taken_back_after, runs, chunksize=2))


def detection(asked: argparse.Namespace) -> list[FleetGoal]:
    """Run A/B at every share, and return the goals of the smallest: there it is to be found."""
    goals = []
    error = ALPHA * WEIGHTS["refused"]
    print("A worse version: requests of it until it is taken back, and the bound for any test")
    heads = (f"in {HORIZON}", "bound", "of 1 %")
    print(
        f"{'refuses':>8} {'share':>6} {'median':>7} {'p90':>7} "
        + " ".join(f"{h:>7}" for h in heads)
    )
    for percent in SHARES:
        for baseline in BASELINES:
            seeds = range(asked.seed, asked.seed + asked.seeds)
            runs = [Run(each, baseline, asked.more, percent, most=2 * HORIZON) for each in seeds]
            after = each_after(runs, asked.jobs)
            within = sum(each <= HORIZON for each in after) / len(after)
            figures = (percentile(after, 0.5), percentile(after, 0.9))
            bounds = [bound(baseline, percent, asked.more, each) for each in (error, 0.01)]
            print(
                f"{baseline:8.0%} {percent:5}% " + " ".join(f"{each:7.0f}" for each in figures),
                *(f"{each:7.1%}" for each in (within, *bounds)),
                flush=True,
            )
            if percent == SHARES[0]:
                text = f"taken back within {HORIZON} requests, of {baseline:.0%} refusals"
                goals.append(FleetGoal(name="G11", text=text, reached=within, wanted=WITHIN))
    return goals


def alarms(asked: argparse.Namespace, kind: Kind, watch: int) -> float:
    """Return the part of A/A runs, in turns over the baselines and shares, that are taken back."""
    settings = [(percent, baseline) for percent in SHARES for baseline in BASELINES]
    runs = []
    for at in range(asked.same):
        percent, baseline = settings[at % len(settings)]
        if kind is not ALIKE:
            baseline = max(baseline, 0.01)
        runs.append(
            Run(
                asked.seed + at,
                baseline,
                percent=percent,
                kind=kind,
                watch=watch,
                per_look=10 * PER_LOOK * SHARES[0] // percent,
            )
        )
    return sum(each < NEVER for each in each_after(runs, asked.jobs)) / max(1, len(runs))


def false_alarms(asked: argparse.Namespace) -> list[FleetGoal]:
    print(f"Equal versions: those that are taken back, of {asked.same} runs of {MOST} requests")
    print(f"{'organizations':>14} {'watch 0':>8} {f'watch {WATCH}':>10}")
    goals = []
    for kind in (ALIKE, *UNLIKE):
        unwatched, watched = (alarms(asked, kind, watch) for watch in (0, WATCH))
        print(f"{kind.name:>14} {unwatched:8.1%} {watched:10.1%}", flush=True)
        text = f"false alarms, organizations {kind.name}"
        goals.append(
            FleetGoal(name="G11", text=text, reached=watched, wanted=MOST_ALARMS, at_most=True)
        )
    return goals


def main(command: str, arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"bench.fleet {command}", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="runs of each A/B row")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--same", type=int, default=200, help="A/A runs of each kind")
    parser.add_argument("--more", type=float, default=MORE, help="share that it refuses more")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    asked = parser.parse_args(arguments)
    return tell([*detection(asked), *false_alarms(asked)])
