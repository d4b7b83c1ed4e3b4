"""The gather of embedding rows, whole and of one rank's part of the vocabulary."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.pointwise import embedding_triton
from engine.kernels.pointwise.embedding import gather_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1, 80, 1030])
def test_every_id(size: int, dtype: torch.dtype, device: torch.device) -> None:
    table = torch.randn(11, size, device=device).to(dtype)
    ids = torch.tensor([0, 10, 3, 3], device=device)
    out = torch.full((4, size), torch.nan, device=device, dtype=dtype)
    embedding_triton.gather_rows(ids, table, 0, out)
    assert torch.equal(out, table[ids])
    assert gather_rows(ids[:0], table).shape == (0, size)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_ranks_sum_up(ranks: int, device: torch.device) -> None:
    """Also where the rows beside a rank's own are not numbers."""
    table = torch.randn(12, 20, device=device)
    ids = torch.tensor([0, 11, 5, 6, 3, 2, 9, 8], device=device)
    rows, total = 12 // ranks, torch.zeros(8, 20, device=device)
    for rank in range(ranks):
        surrounded = torch.full((3 * rows, 20), torch.nan, device=device)
        own = surrounded[rows : 2 * rows]
        own.copy_(table[rank * rows : (rank + 1) * rows])
        total += gather_rows(ids, own, rank * rows)
    assert torch.equal(total, table[ids])
