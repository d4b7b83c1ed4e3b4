"""Linear layers cut over a group of ranks by output (column) or by input (row), arXiv:1909.08053.

Knows checkpoint names only as they are handed in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.linear.dispatch import pack_linear, pack_parts
from engine.layers.parallel import ParallelGroup, own_shard
from engine.layers.weight_source import WeightSource


class ColumnParallelLinear:
    """[T, in] -> [T, this rank's share of out]. Several projections of one input are fused into one
    product: their outputs lie side by side, in the order of `parts`."""

    def __init__(
        self,
        source: WeightSource,
        parts: Sequence[tuple[str, int]],
        in_features: int,
        *,
        bias: bool,
        group: ParallelGroup,
    ) -> None:
        """parts: (name of the projection in the checkpoint, out_features over all ranks)."""
        shard = own_shard(group)
        weights = [source.linear(name, out, in_features, shard) for name, out in parts]
        biases = [source.take(f"{name}.bias", (out,), shard) for name, out in parts if bias]
        self._product = pack_parts(
            weights, torch.cat(biases) if biases else None, deterministic=source.deterministic
        )
        self._lora = source.lora(parts, in_features, shard)

    def __call__(self, x: Tensor) -> Tensor:
        y = self._product(x)
        if self._lora is not None:
            self._lora.add(y, x)
        return y


class RowParallelLinear:
    """[T, this rank's share of in] -> [T, out], summed over the ranks."""

    def __init__(
        self,
        source: WeightSource,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        group: ParallelGroup,
    ) -> None:
        self._group = group
        shard = own_shard(group, dim=1)
        weight = source.linear(name, out_features, in_features, shard)
        # Taken by every rank, added by one: the sum over ranks must hold it once.
        taken = source.take(f"{name}.bias", (out_features,)) if bias else None
        self._product = pack_linear(
            weight, taken if group.rank == 0 else None, deterministic=source.deterministic
        )
        self._lora = source.lora(((name, out_features),), in_features, shard)

    def __call__(self, x: Tensor) -> Tensor:
        y = self._product(x)
        if self._lora is not None:  # linear in x, so the sum over the ranks completes it, too
            self._lora.add(y, x)
        return self._group.all_reduce(y)
