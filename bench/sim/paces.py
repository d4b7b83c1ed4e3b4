"""Simulate a burst with chunks of prompts by the engine's pace, without a limit, and of a fixed
size, on machines of several speeds.

The pace learns what a step costs. What a fixed size would have to be, nobody can know before the
machine and the model are: the one that keeps a slow machine's tokens in time wastes a fast one's
steps.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import msgspec

from bench.sim.cost import Cost
from bench.sim.orderings import FAIR
from bench.sim.report import percentile
from bench.sim.world import Session, Setup, Turn, World
from engine.scheduling.pace import Pace

TARGET_S = 0.2
COST = Cost(step_s=6e-3, decode_s=4e-4, prompt_token_s=4e-4, context_token_s=1e-6, pair_s=2e-8)
"""About that of a model of 135 M parameters on two cores."""
SPEEDS = (0.25, 1.0, 4.0)
CHUNKS = (32, 64, 128, 512)
NUM_REQUESTS = 64
BUDGET = 512


class FixedChunk(Pace):
    """The same number of tokens beside decodes, whatever they take."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(None)
        self._num_tokens = num_tokens

    def prompt_tokens(self, num_decodes: int, budget: int) -> int:
        return budget if num_decodes == 0 else min(self._num_tokens, budget)

    def long_prompt_tokens(self, num_decodes: int, budget: int) -> int:
        return self.prompt_tokens(num_decodes, budget)


class BurstResult(msgspec.Struct, frozen=True):
    itl_p99_s: float
    seconds: float
    """Until the last answer is complete."""


PACES: Mapping[str, Callable[[], Pace]] = {
    "learnt": partial(Pace, TARGET_S),
    "no limit": partial(Pace, None),
    **{f"{size} tokens": partial(FixedChunk, size) for size in CHUNKS},
}


def burst(cost: Cost, pace: Callable[[], Pace], seed: int = 1) -> BurstResult:
    """Ask for all at once: prompts of 32 to 512 tokens, answers of 16 to 256."""
    rng = random.Random(seed)
    turns = [Turn(rng.randint(32, 512), rng.randint(16, 256)) for _ in range(NUM_REQUESTS)]
    sessions = [Session(0.0, "interactive", str(n), (turn,)) for n, turn in enumerate(turns)]
    world = World(cost, FAIR, Setup(max_num_batched_tokens=BUDGET, pace=pace))
    outcome = world.run(sessions, math.inf)
    return BurstResult(percentile(outcome.gaps_s["interactive"], 0.99), outcome.busy_s)


def slowed(cost: Cost, times: float) -> Cost:
    """The cost on a machine where all takes so many times as long."""
    seconds = {
        name: times * value
        for name, value in msgspec.structs.asdict(cost).items()
        if name.endswith("_s")
    }
    return msgspec.structs.replace(cost, **seconds)


def compare(speeds: Iterable[float] = SPEEDS) -> dict[float, dict[str, BurstResult]]:
    """Return the outcomes by the machine's speed and the pace."""
    return {
        speed: {name: burst(slowed(COST, 1 / speed), pace) for name, pace in PACES.items()}
        for speed in speeds
    }
