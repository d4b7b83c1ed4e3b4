"""Holds what the samplers' tests share: one row to sample, of a sequence as it was asked and as far
as it got.
"""

from __future__ import annotations

from typing import Any

from engine.protocol import SamplingParams
from engine.runner.batch.batch import SampleRow
from engine.sequence import Constraint, Sequence


def sample_row(
    *,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    derived_seed: int = 0,
    constraint: Constraint | None = None,
    **params: Any,
) -> SampleRow:
    """params: of `SamplingParams`. derived_seed: what the engine made of their own or drew."""
    seq = Sequence(
        request_id="r",
        index=0,
        order=(0, 0),
        prompt_token_ids=prompt or [1],
        sampling=SamplingParams(**({"max_tokens": 100} | params)),
        seed=derived_seed,
        cache_salt="",
        output_token_ids=output or [],
        constraint=constraint,
    )
    return SampleRow(seq, seq.num_output_tokens, [])
