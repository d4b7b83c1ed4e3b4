"""Fits the cost model to the real engine, and holds the simulator against it.

The model is penny, on one thread of the CPU; seconds are the processor's, and of each step the
least of ROUNDS: what else runs on the machine only ever makes one longer. A fit is no proof:
`check` runs another case than was fitted, larger and mixed, and compares the whole. In turn with it
runs a part of what was fitted: how much faster the machine is now than it was then (its clock, what
shares its caches) is held against neither.
"""

from __future__ import annotations

import math
import os
import random
import time
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.sim.cost import Cost
from bench.sim.orderings import FAIR
from bench.sim.world import Session, Setup, Turn, World
from bench.tools.record import machine
from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.protocol import EngineRequest, SamplingParams
from engine.scheduling.step_costs import StepWork

MODEL = Path(__file__).resolve().parents[2] / "models" / "penny"
NUM_BLOCKS = 8192
ALLOWED = 0.15
"""How far the simulator may be from the engine."""
DECODES = (1, 2, 4, 8, 16, 32, 64)
PROMPTS = (16, 128, 512, 1024)
ANSWER = 12
LONG = 3500
ROUNDS = 3
"""Rounds of each case; the fastest step counts."""
CHECKED = 160
"""Requests of the case that is checked."""
CALIBRATED = [Turn(128, ANSWER)] * 32 + [Turn(512, ANSWER)] * 8
"""The fitted workload that measures the machine's speed at the time of a check."""
OUTLIER = 2.5
Timed = tuple[StepWork, float]


class Case(NamedTuple):
    """All asked at once: the steps, and of each request those of its first and last token."""

    steps: list[Timed]
    spans: list[tuple[int, int]]

    @property
    def total_s(self) -> float:
        return sum(step_s for _, step_s in self.steps)

    def ends_s(self) -> list[float]:
        """Return when the steps end, from the beginning."""
        return list(accumulate(step_s for _, step_s in self.steps))


class Engine:
    """The real one; its steps are timed, and what was in them is kept."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        config = EngineConfig(
            model=MODEL, device="cpu", num_blocks=NUM_BLOCKS, num_threads=1, itl_target_s=0
        )
        self.core = EngineCore(config)
        self._parts: list[StepWork] = []
        self._num_requests = 0
        schedule = self.core._scheduler.schedule

        def watched() -> Any:
            output = schedule()
            self._parts.append(StepWork.of(output.scheduled))
            return output

        self.core._scheduler.schedule = watched  # type: ignore[method-assign]

    def least(self, asked: list[Turn], rng: random.Random) -> Case:
        """Return the least time over ROUNDS, which have the same steps: prompts are as long and
        always new."""
        return least_of([self.run(asked, rng) for _ in range(ROUNDS)])

    def run(self, asked: list[Turn], rng: random.Random) -> Case:
        vocab = self.core.resolved.vocab_size
        spans: dict[str, tuple[int, int]] = {}
        for turn in asked:
            self._num_requests += 1
            name = str(self._num_requests)
            spans[name] = (-1, -1)
            sampling = SamplingParams(max_tokens=turn.answer, temperature=0.0, ignore_eos=True)
            ids = [rng.randrange(vocab) for _ in range(turn.prompt)]
            self.core.add(EngineRequest(request_id=name, prompt_token_ids=ids, sampling=sampling))
        steps: list[Timed] = []
        before_s = time.process_time()
        while self.core.has_work():
            outputs = self.core.step()
            now_s = time.process_time()
            for output in outputs:
                first, _ = spans[output.request_id]
                spans[output.request_id] = (first if first >= 0 else len(steps), len(steps))
            steps.append((self._parts[-1], now_s - before_s))
            before_s = now_s
        return Case(steps, list(spans.values()))


def least_of(rounds: list[Case]) -> Case:
    for other in rounds[1:]:
        same = [parts for parts, _ in other.steps] == [parts for parts, _ in rounds[0].steps]
        assert same and other.spans == rounds[0].spans, "rounds of one case differ"
    each = zip(*(case.steps for case in rounds), strict=True)
    steps = [(same[0][0], min(step_s for _, step_s in same)) for same in each]
    return Case(steps, rounds[0].spans)


def fit() -> Cost:
    engine, rng = Engine(), random.Random(1)
    load = os.getloadavg()[0]
    timed: list[Timed] = []
    engine.run([Turn(600, 4)] * 4, rng)  # a first step of a size makes its buffers
    for prompt in PROMPTS:
        for decodes in DECODES:
            if decodes * prompt <= 16_384:
                timed += engine.least([Turn(prompt, ANSWER)] * decodes, rng).steps
    timed += engine.least([Turn(LONG, ANSWER)], rng).steps
    timed += engine.least([Turn(16, 40)] * 8 + [Turn(LONG, 4)], rng).steps
    values, error = _solve(timed)
    names = ("step_s", "decode_s", "prompt_token_s", "context_token_s", "pair_s")
    fitted = {
        "model": "models/penny",
        "threads": 1,
        "seconds_of": "the processor",
        "steps": len(timed),
        "median_error": round(error, 4),
        "load_average": load,
        "torch": str(torch.__version__),
        "machine": machine(),
    }
    return Cost(**dict(zip(names, values, strict=True)), fitted=fitted)


def _solve(timed: list[Timed]) -> tuple[list[float], float]:
    """Least squares of relative errors, without negative constants and, the second time, without
    steps that something else fell into; the constants, and the median of the relative errors."""
    rows = np.array(
        [[1, p.decodes, p.prompt_tokens, p.context_tokens, p.pairs] for p, _ in timed], dtype=float
    )
    seconds = np.array([s for _, s in timed])
    kept = np.full(len(timed), True)
    solution = np.zeros(rows.shape[1])
    for _ in range(2):
        solution = _non_negative(rows[kept] / seconds[kept, None])
        kept = seconds < OUTLIER * (rows @ solution)
    errors = np.abs(rows @ solution / seconds - 1)
    return [float(value) for value in solution], float(np.median(errors))


def _non_negative(rows: Any) -> Any:
    """Solve for constants that are not negative: one that comes out negative is left out, the worst
    first."""
    columns = list(range(rows.shape[1]))
    scale = rows.max(axis=0)
    while True:
        found = np.linalg.lstsq(rows[:, columns] / scale[columns], np.ones(len(rows)), rcond=None)
        if found[0].min() >= 0:
            solution = np.zeros(rows.shape[1])
            solution[columns] = found[0] / scale[columns]
            return solution
        del columns[int(found[0].argmin())]


def check(cost: Cost) -> dict[str, Any]:
    """The engine and the simulator on a case that was not fitted: time to the first token, time per
    token after it, tokens per second, and the ratios of the simulator's to the engine's."""
    rng = random.Random(2)
    asked = [Turn(rng.randint(24, 900), rng.randint(8, 96)) for _ in range(CHECKED)]
    engine = Engine()
    engine.run([Turn(600, 4)] * 4, rng)
    loads = [os.getloadavg()[0]]
    known, found = [], []
    for _ in range(ROUNDS):
        known.append(engine.run(CALIBRATED, rng))
        found.append(engine.run(asked, rng))
    loads.append(os.getloadavg()[0])
    speed = sum(parts.seconds(cost) for parts, _ in known[0].steps) / least_of(known).total_s
    case = least_of(found)
    measured = {name: each * speed for name, each in _figures(asked, case).items()}
    world = World(cost, FAIR, Setup(num_blocks=NUM_BLOCKS, itl_target_s=None))
    outcome = world.run([Session(0.0, "interactive", "", (turn,)) for turn in asked], math.inf)
    simulated = {
        "ttft_s": _mean([fate.first_s or 0.0 for fate in outcome.fates]),
        "tpot_s": _mean(
            [(fate.last_s - (fate.first_s or 0.0)) / (fate.said - 1) for fate in outcome.fates]
        ),
        "token_s": outcome.busy_s / sum(turn.answer for turn in asked),
    }
    return compared(measured, simulated) | {
        "steps": [outcome.num_steps, len(case.steps)],
        "machine_speed": speed,
        "load_average": loads,
    }


def _figures(asked: list[Turn], case: Case) -> dict[str, float]:
    """Seconds."""
    ends_s = case.ends_s()
    spans = zip(asked, case.spans, strict=True)
    return {
        "ttft_s": _mean([ends_s[first] for first, _ in case.spans]),
        "tpot_s": _mean([(ends_s[b] - ends_s[a]) / (turn.answer - 1) for turn, (a, b) in spans]),
        "token_s": case.total_s / sum(turn.answer for turn in asked),
    }


def compared(measured: dict[str, float], simulated: dict[str, float]) -> dict[str, Any]:
    """`measured`: on the machine as it was when it was fitted."""
    deviations = {name: simulated[name] / measured[name] - 1 for name in measured}
    # Tokens per second are what one takes, upside down.
    deviations["tokens_per_s"] = 1 / (1 + deviations.pop("token_s")) - 1
    return {
        "engine": measured,
        "simulated": simulated,
        "deviations": deviations,
        "within": all(abs(deviation) <= ALLOWED for deviation in deviations.values()),
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
