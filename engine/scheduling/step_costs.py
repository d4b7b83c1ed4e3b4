"""Learns what steps cost, as a sum over what is in them (`engine.protocol.StepCosts`).

    seconds = step + decode * decodes + prompt_token * prompt tokens
            + context_token * context tokens of decodes + pair * pairs of prompts
            + chunk_context_token * context tokens of chunks

Least squares of relative errors without negative constants, over the steps of the last while: each
step's row goes into the normal equations, older ones fade. Steps with prompts and steps without
fade apart, so that an hour of decodes leaves what a prompt takes as it was. A solution is made when
somebody asks; what the steps do not tell apart stays as it was in the one before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from engine.protocol import StepCosts
from engine.scheduling.step_plan import ScheduledSequence

FADE = 1 / 500
"""The part of older steps' weight that a step takes."""
STIFFNESS = 1e-6
"""The weight of the solution before, beside that of all steps."""
LEAST_STEPS = 8
"""Before so many steps with prompts nothing is told."""
NAMES = StepCosts.__struct_fields__


class StepWork(msgspec.Struct, frozen=True):
    """The parts of a step."""

    decodes: int
    prompt_tokens: int
    context_tokens: int
    pairs: float
    chunk_context_tokens: int = 0

    @staticmethod
    def of(scheduled: Iterable[ScheduledSequence]) -> StepWork:
        decodes = prompt_tokens = context_tokens = chunk_context_tokens = 0
        pairs = 0.0
        for entry in scheduled:
            num_tokens, start = entry.num_new_tokens, entry.start
            if num_tokens == 1 and entry.samples:
                decodes += 1
                context_tokens += start + 1
            else:
                prompt_tokens += num_tokens
                chunk_context_tokens += start
                pairs += num_tokens * (start + (num_tokens + 1) / 2)
        return StepWork(decodes, prompt_tokens, context_tokens, pairs, chunk_context_tokens)

    def row(self) -> tuple[float, ...]:
        """Return what each constant is multiplied by."""
        return (
            1.0,
            self.decodes,
            self.prompt_tokens,
            self.context_tokens,
            self.pairs,
            self.chunk_context_tokens,
        )

    def seconds(self, costs: StepCosts) -> float:
        return (
            costs.step_s
            + costs.decode_s * self.decodes
            + costs.prompt_token_s * self.prompt_tokens
            + costs.context_token_s * self.context_tokens
            + costs.pair_s * self.pairs
            + costs.chunk_context_token_s * self.chunk_context_tokens
        )


class _Equations:
    """The normal equations of one kind of steps."""

    def __init__(self) -> None:
        self.products: Any = np.zeros((len(NAMES), len(NAMES)))
        self.sums: Any = np.zeros(len(NAMES))
        self.num_steps = 0

    def add(self, row: Any) -> None:
        """`row`: over the seconds of the step, so that its sum is to be 1."""
        self.products *= 1 - FADE
        self.products += np.outer(row, row)
        self.sums *= 1 - FADE
        self.sums += row
        self.num_steps += 1


class LearntCosts:
    """Learns from `observe`, answers `costs`. Not thread-safe."""

    def __init__(self) -> None:
        self._decoding, self._prompting = _Equations(), _Equations()
        self._solution: Any = np.zeros(len(NAMES))
        self._costs = StepCosts()
        self._is_solved = True

    def observe(self, parts: StepWork, step_s: float) -> None:
        """A step of these parts took so many seconds, above 0."""
        equations = self._prompting if parts.prompt_tokens else self._decoding
        equations.add(np.array(parts.row()) / step_s)
        self._is_solved = False

    @property
    def costs(self) -> StepCosts:
        if not self._is_solved and self._prompting.num_steps >= LEAST_STEPS:
            self._solution = _solve(
                self._decoding.products + self._prompting.products,
                self._decoding.sums + self._prompting.sums,
                self._solution,
            )
            self._costs = StepCosts(**dict(zip(NAMES, self._solution.tolist(), strict=True)))
            self._is_solved = True
        return self._costs


def _solve(products: Any, sums: Any, before: Any) -> Any:
    """Solve for constants that are not negative: one that comes out negative is left out, the worst
    first. What the equations leave open stays near `before`."""
    scale = np.sqrt(np.maximum(products.diagonal(), np.finfo(float).tiny))
    left = products / np.outer(scale, scale) + STIFFNESS * np.eye(len(scale))
    right = sums / scale + STIFFNESS * before * scale
    columns = [*range(len(scale))]
    solution = np.zeros(len(scale))
    while columns:
        found = np.linalg.solve(left[np.ix_(columns, columns)], right[columns])
        if found.min() >= 0:
            solution[columns] = found / scale[columns]
            break
        del columns[int(found.argmin())]
    return solution
