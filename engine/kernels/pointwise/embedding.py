"""Rows of a table by token id, and what a rank gives that holds only part of the vocabulary.

Knows no ranks: whose row is elsewhere gets zeros, so that the sum over all holders is the row.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from engine.kernels.backend import uses_triton


def gather_rows(token_ids: Tensor, table: Tensor, first: int | None = None) -> Tensor:
    """int64 [T], table [rows, hidden] -> [T, hidden], a new tensor.

    first: row 0 is that of this token id, and ids outside [first, first + rows) give zeros. None:
    every id is a row of the table.
    """
    if uses_triton(table.device):
        from engine.kernels.pointwise import embedding_triton

        return embedding_triton.gather_rows(token_ids, table, first or 0)
    if first is None:
        return F.embedding(token_ids, table)
    local = token_ids - first
    elsewhere = (local < 0) | (local >= table.shape[0])
    found = F.embedding(local.masked_fill(elsewhere, 0), table)
    return found.masked_fill(elsewhere[:, None], 0.0)
