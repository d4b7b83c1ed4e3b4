"""`bench.fleet hot` and `paced`: how even replicas work where a prefix draws all requests to the
replica that computed it first.

hot: one system prompt for all, requests at random at half of what the replicas can do. paced:
agents with that system prompt who ask in turn, so that nothing runs anywhere when a replica is
chosen, on two replicas: 448 and 0 requests in a report on a router that scores by overlap.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count

import msgspec

from bench.fleet.anchors import ANCHORS
from bench.fleet.goals import FleetGoal, tell
from bench.fleet.ours import PredictedTime
from bench.fleet.routers import HEAD, OURS, MakeRouter, gpu_cost, line_of, mean_of, parser_of, run
from bench.fleet.trace import BLOCK_TOKENS, TracedRequest
from bench.fleet.world import FleetSetup

SYSTEM_BLOCKS = 8
HOT_REQUESTS = 4_000
HOT_LOAD = 0.5
AGENTS, TURNS = 16, 28
PACE_S = 2.0
"""Longer than any turn of an agent takes."""
MOST = 1.15
"""The busiest replica's work over the mean."""


def hot(setup: FleetSetup, seed: int) -> list[TracedRequest]:
    rng, fresh = random.Random(f"hot {seed}"), count(SYSTEM_BLOCKS)
    own = [rng.randint(128, 4_096) for _ in range(HOT_REQUESTS)]
    outputs = [rng.randint(16, 512) for _ in range(HOT_REQUESTS)]
    cached = SYSTEM_BLOCKS * BLOCK_TOKENS
    work_s = sum(
        setup.cost.request_s(cached + tokens, output, cached=cached)
        for tokens, output in zip(own, outputs, strict=True)
    )
    per_s = HOT_LOAD * setup.num_replicas * HOT_REQUESTS / work_s
    at_s, made = 0.0, []
    for tokens, output in zip(own, outputs, strict=True):
        at_s += rng.expovariate(per_s)
        blocks = (*range(SYSTEM_BLOCKS), *_take(fresh, -(-tokens // BLOCK_TOKENS)))
        made.append(TracedRequest(at_s, cached + tokens, output, blocks))
    return made


def paced(seed: int) -> list[TracedRequest]:
    rng, fresh = random.Random(f"paced {seed}"), count(SYSTEM_BLOCKS)
    known = [[*range(SYSTEM_BLOCKS)] for _ in range(AGENTS)]
    made: list[TracedRequest] = []
    for _ in range(TURNS):
        for agent in rng.sample(range(AGENTS), AGENTS):
            known[agent] += _take(fresh, rng.randint(1, 3))
            blocks = tuple(known[agent])
            length = len(blocks) * BLOCK_TOKENS
            made.append(TracedRequest(PACE_S * len(made), length, rng.randint(16, 128), blocks))
    return made


def _take(fresh: Iterator[int], number: int) -> list[int]:
    return [next(fresh) for _ in range(number)]


def main(command: str, arguments: list[str]) -> int:
    asked = parser_of(command, __doc__ or "", takes_trace=False).parse_args(arguments)
    setup = FleetSetup(cost=gpu_cost())
    if command == "paced":
        setup = msgspec.structs.replace(setup, num_replicas=2)
    makers: dict[str, MakeRouter] = {**ANCHORS, OURS: PredictedTime}
    print(f"  {'':<18} {HEAD}")
    spread = 0.0
    for name, make in makers.items():
        reports = []
        for seed in range(1, asked.seeds + 1):
            made = paced(seed) if command == "paced" else hot(setup, seed)
            reports.append(run(made[: asked.requests], setup, make, seed))
        print(f"  {name:<18} {line_of(mean_of(reports))}", flush=True)
        spread = max(each.spread for each in reports)
    text = f"the busiest replica's work over the mean, {command}, worst of {asked.seeds} seeds"
    return tell([FleetGoal(name="G3", text=text, reached=spread, wanted=MOST, at_most=True)])
