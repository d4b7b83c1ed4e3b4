"""The inputs of rotation and the norms before it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Rotation(NamedTuple):
    """The rotation of the tokens of one step, for all heads."""

    cos: Tensor
    """[N, 1, head_dim], both halves alike"""
    sin: Tensor
    """[N, 1, head_dim / 2]"""
    positions: Tensor | None = None
    """int64 [T]: the row of each token. None: row i is that of token i."""


class QKVHeads(NamedTuple):
    """How the heads of a token lie in the product: queries, keys, values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class QKNorm(NamedTuple):
    """Weights [head_dim] of the norms of queries and keys."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float
