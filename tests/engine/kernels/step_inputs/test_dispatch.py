"""A step's inputs are completed as the reference does it, whatever the device kept before."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.kernels.step_inputs.dispatch import complete_reference
from engine.kernels.step_inputs.triton import complete
from engine.kernels.step_inputs.types import StepInputs

BLOCK_SIZE = 4
POISON = -77


def random_step(draw: np.random.Generator, device: torch.device) -> StepInputs:
    """Long tables, tables that change behind the step's end, nothing at all, and padding."""
    num_seqs = int(draw.integers(1, 6))
    lens = draw.integers(0, 3, num_seqs)
    seq_lens = np.where(lens > 0, lens + draw.integers(0, 1200, num_seqs), 0)
    first = draw.integers(0, 310, num_seqs)
    counts = draw.integers(0, 3, num_seqs) * draw.integers(0, 150, num_seqs)
    previous = np.where(lens > 0, draw.integers(-1, 5, num_seqs), -1)

    def tensor(values: np.ndarray, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return StepInputs(
        token_ids=tensor(draw.integers(5, 99, max(1, lens.sum())), torch.int64),
        query_start=tensor(np.concatenate([[0], lens.cumsum()])),
        seq_lens=tensor(seq_lens),
        previous_rows=tensor(previous),
        table_rows=tensor(draw.permutation(8)[:num_seqs]),
        first_changed=tensor(first),
        num_changed=tensor(counts),
        changes_at=tensor(np.concatenate([[0], counts.cumsum()[:-1]])),
        changes=tensor(draw.integers(0, 1 << 20, max(1, counts.sum()))),
    )


@pytest.mark.parametrize("seed", range(8))
def test_as_the_reference(seed: int, device: torch.device) -> None:
    draw = np.random.default_rng(seed)
    drawn = torch.tensor(draw.integers(-1, 99, 5), device=device)
    kept = torch.tensor(draw.integers(0, 1 << 20, (8, 640)), dtype=torch.int32, device=device)
    tables = torch.full_like(kept, POISON)
    wanted_kept, wanted_tables = kept.clone(), tables.clone()
    for _ in range(3):
        step = random_step(draw, device)
        wanted = step._replace(token_ids=step.token_ids.clone())
        complete(step, drawn, kept, tables, BLOCK_SIZE)
        complete_reference(wanted, drawn, wanted_kept, wanted_tables, BLOCK_SIZE)
        assert torch.equal(step.token_ids, wanted.token_ids)
        assert torch.equal(kept, wanted_kept)
        assert torch.equal(tables, wanted_tables)
        assert int(step.token_ids.min()) >= 0
