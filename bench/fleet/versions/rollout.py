"""`bench.fleet rollout`: how soon a version that refuses more is taken back, and how often one that
does not.

Requests end at random as either version has them end, and the shipped comparison looks at both
after every 40. A/B: the new version refuses 5 percentage points more. A/A: it is the same one. The
last rows are A/A runs of organizations that refuse in ways of their own, of which each gets one
version alone: no number of requests tells that from a worse version, only what was seen before it.
"""

from __future__ import annotations

import argparse
import math
from typing import NamedTuple

import numpy as np

from bench.fleet.goals import FleetGoal, tell
from bench.sim.report import percentile
from gateway.registry.comparison import REGARDS, Comparison, Outcomes

BASELINES = (0.0, 0.01, 0.02, 0.05)
SHARES = (0.05, 0.25, 0.5)
MORE = 0.05
OTHERS = (0.005, 0.002, 0.1, 0.03)
"""The shares of both versions in the other regards."""
WITHIN = 500
"""Requests of the new version, until it is to be taken back."""
MOST = 4000
"""Requests of the new version in an A/A run."""
NUM_ORGANIZATIONS, EVENNESS = 200, 0.8
NEVER = math.inf
MOST_ALARMS = 0.01


class Run(NamedTuple):
    """`share`: of the organizations that get the new version; `per_look`: requests that end between
    two looks; `most`: of the new version's requests in the run."""

    baseline: float
    more: float = 0.0
    share: float = 0.05
    spread: float = 0.0
    watched: int = 0
    per_look: int = 40
    most: int = MOST


class Organizations:
    """Organizations that send and refuse in their own ways, of which some get the new version.
    `spread`: the standard deviation of the log odds by which they refuse."""

    def __init__(self, rng: np.random.Generator, baseline: float, spread: float, share: float):
        ranks = np.arange(1, NUM_ORGANIZATIONS + 1) ** -EVENNESS
        weights = rng.permutation(ranks / ranks.sum())
        odds = math.log(max(baseline, 1e-9) / (1 - baseline)) + spread * rng.standard_normal(
            NUM_ORGANIZATIONS
        )
        refused = 1 / (1 + np.exp(-odds)) if spread else np.full(NUM_ORGANIZATIONS, baseline)
        are_new = rng.permutation(NUM_ORGANIZATIONS) < round(share * NUM_ORGANIZATIONS)
        self.share = float(weights[are_new].sum())
        """The part of all requests that the new version gets."""
        self.new = float((weights * refused)[are_new].sum() / weights[are_new].sum())
        self.old = float((weights * refused)[~are_new].sum() / weights[~are_new].sum())


def ended(rng: np.random.Generator, requests: int, refused: float) -> Outcomes:
    shares = (refused, *OTHERS)
    counts = [int(rng.binomial(requests, share)) for share in shares]
    return Outcomes(requests=requests, **dict(zip(REGARDS, counts, strict=True)))


def taken_back_after(seed: int, run: Run) -> float:
    """Return after how many of its requests a version is taken back; NEVER: not within `most`."""
    rng = np.random.default_rng(seed)
    those = Organizations(rng, run.baseline, run.spread, run.share)
    compared = Comparison()
    if run.watched:
        before = round(run.watched / those.share)
        compared = Comparison.allowing(
            ended(rng, run.watched, those.new), ended(rng, before - run.watched, those.old)
        )
    num_new = 0
    while num_new < run.most:
        new = int(rng.binomial(run.per_look, those.share))
        compared.add(
            ended(rng, new, min(1.0, those.new + run.more)),
            ended(rng, run.per_look - new, those.old),
        )
        num_new += new
        if compared.is_worse:
            return num_new
    return NEVER


def detection(asked: argparse.Namespace) -> list[FleetGoal]:
    """Run A/B at every share, and return the goals of the smallest: there it is to be found."""
    goals = []
    print("A worse version: requests of it until it is taken back")
    print(f"{'refuses':>8} {'share':>6} {'median':>7} {'p90':>7} {f'in {WITHIN}':>7}")
    for share in SHARES:
        for baseline in BASELINES:
            run = Run(baseline, more=asked.more, share=share)
            after = [taken_back_after(asked.seed + at, run) for at in range(asked.seeds)]
            median, p90 = percentile(after, 0.5), percentile(after, 0.9)
            within = sum(each <= WITHIN for each in after) / len(after)
            print(f"{baseline:8.0%} {share:6.0%} {median:7.0f} {p90:7.0f} {within:7.0%}")
            if share == SHARES[0]:
                text = f"taken back after, of {baseline:.0%} refusals, in the median"
                goals.append(
                    FleetGoal(name="G11", text=text, reached=median, wanted=WITHIN, at_most=True)
                )
    return goals


def false_alarms(asked: argparse.Namespace) -> FleetGoal:
    """Run A/A in turns over the baselines and shares, and return the goal of their alarms."""
    settings = [Run(baseline, share=share) for share in SHARES for baseline in BASELINES]
    alarms = sum(
        taken_back_after(asked.seed + at, settings[at % len(settings)]) < NEVER
        for at in range(asked.same)
    )
    text = f"false alarms in {asked.same} A/A runs of {MOST} requests"
    reached = alarms / max(1, asked.same)
    return FleetGoal(name="G11", text=text, reached=reached, wanted=MOST_ALARMS, at_most=True)


def unlike_organizations(asked: argparse.Namespace) -> None:
    """Print the alarms of A/A runs where organizations differ, with and without a watch before."""
    print("Organizations that differ (2 % refusals, 5 %): alarms in A/A runs")
    print(f"{'spread':>8} {'watched':>8} {'alarms':>7}")
    for spread in (0.3, 0.6):
        for watched in (0, 1000):
            run = Run(0.02, spread=spread, watched=watched)
            alarms = sum(
                taken_back_after(asked.seed + at, run) < NEVER for at in range(asked.seeds)
            )
            print(f"{spread:8.1f} {watched:8d} {alarms / asked.seeds:7.0%}")


def main(command: str, arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"bench.fleet {command}", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="runs of each row")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--same", type=int, default=200, help="A/A runs in all")
    parser.add_argument("--more", type=float, default=MORE, help="share that it refuses more")
    asked = parser.parse_args(arguments)
    goals = [*detection(asked), false_alarms(asked)]
    unlike_organizations(asked)
    return tell(goals)
