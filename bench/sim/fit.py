"""Fits the cost model to the real engine, and holds the simulator against it.

Above: `__main__.py`. Below: `engine.core`, `world.py`. The model is penny, on one thread of the
CPU; seconds are the processor's, so that what else runs on the machine changes them little. A fit
is no proof: `check` runs another case than was fitted, larger and mixed, and compares the whole.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.record import machine
from bench.sim.cost import Cost, Parts
from bench.sim.orderings import FAIR
from bench.sim.world import Session, Setup, Turn, World
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.protocol import EngineRequest, SamplingParams

MODEL = Path(__file__).resolve().parents[2] / "models" / "penny"
NUM_BLOCKS = 8192
ALLOWED = 0.15
"""How far the simulator may be from the engine."""
DECODES = (1, 2, 4, 8, 16, 32, 64)
PROMPTS = (16, 128, 512, 1024)
ANSWER = 12
LONG = 3500
CHECKED = 160
"""Requests of the case that is checked."""
OUTLIER = 2.5
Timed = tuple[Parts, float]


class Engine:
    """The real one; its steps are timed, and what was in them is kept."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        config = EngineConfig(
            model=MODEL, device="cpu", num_blocks=NUM_BLOCKS, num_threads=1, itl_target_s=0
        )
        self.core = EngineCore(config)
        self._parts: list[Parts] = []
        self._num_requests = 0
        schedule = self.core._scheduler.schedule

        def watched() -> Any:
            output = schedule()
            self._parts.append(Parts.of(output.scheduled))
            return output

        self.core._scheduler.schedule = watched  # type: ignore[method-assign]

    def run(self, asked: list[Turn], rng: random.Random) -> tuple[list[Timed], list[float]]:
        """All at once: the steps, and when each had its first token."""
        vocab = self.core.resolved.vocab_size
        names = []
        for turn in asked:
            self._num_requests += 1
            names.append(str(self._num_requests))
            sampling = SamplingParams(max_tokens=turn.answer, temperature=0.0, ignore_eos=True)
            ids = [rng.randrange(vocab) for _ in range(turn.prompt)]
            self.core.add(
                EngineRequest(request_id=names[-1], prompt_token_ids=ids, sampling=sampling)
            )
        timed: list[Timed] = []
        first_s: dict[str, float] = {}
        began_s = time.process_time()
        before_s = began_s
        while self.core.has_work():
            outputs = self.core.step()
            now_s = time.process_time()
            timed.append((self._parts[-1], now_s - before_s))
            before_s = now_s
            for output in outputs:
                first_s.setdefault(output.request_id, now_s - began_s)
        return timed, [first_s[name] for name in names]


def fit() -> Cost:
    engine, rng = Engine(), random.Random(1)
    load = os.getloadavg()[0]
    timed: list[Timed] = []
    engine.run([Turn(600, 4)] * 4, rng)  # a first step of a size makes its buffers
    for _ in range(3):
        for prompt in PROMPTS:
            for decodes in DECODES:
                if decodes * prompt <= 16_384:
                    timed += engine.run([Turn(prompt, ANSWER)] * decodes, rng)[0]
        timed += engine.run([Turn(LONG, ANSWER)], rng)[0]
        timed += engine.run([Turn(16, 40)] * 8 + [Turn(LONG, 4)], rng)[0]
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
    """Whose constant comes out negative is left out, the worst first."""
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
    """The engine and the simulator on a case that was not fitted: the seconds that all of it takes
    and the mean time to the first token, and the ratios of the simulator's to the engine's."""
    rng = random.Random(2)
    asked = [Turn(rng.randint(24, 900), rng.randint(8, 96)) for _ in range(CHECKED)]
    engine = Engine()
    engine.run([Turn(600, 4)] * 4, random.Random(0))
    loads = [os.getloadavg()[0]]
    timed, first_s = engine.run(asked, rng)
    loads.append(os.getloadavg()[0])
    world = World(cost, FAIR, Setup(num_blocks=NUM_BLOCKS, itl_target_s=None))
    sessions = [Session(0.0, "interactive", "", (turn,)) for turn in asked]
    outcome = world.run(sessions, float("inf"))
    simulated = [fate.first_s or 0.0 for fate in outcome.fates]
    total_s, ttft_s = sum(step_s for _, step_s in timed), sum(first_s) / len(first_s)
    ratios = {
        "total": outcome.busy_s / total_s,
        "ttft": sum(simulated) / len(simulated) / ttft_s,
        "steps": outcome.num_steps / len(timed),
    }
    return {
        "engine_total_s": total_s,
        "engine_mean_ttft_s": ttft_s,
        "ratios": ratios,
        "within": all(abs(ratio - 1) <= ALLOWED for ratio in ratios.values()),
        "load_average": loads,
    }
