"""A linear layer's weight in each form that checkpoints store, before a device packs it.

Knows no names, no sharding, no device's layout. N is out_features, K in_features; `dtype` is that
of the activations the weight will meet, and of what the product returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

FP8_MAX = 448.0
"""The largest finite float8_e4m3fn (OCP 8-bit floating point, OFP8)."""
INT8_MAX = 127.0


@dataclass(frozen=True, slots=True)
class DenseWeight:
    weight: Tensor
    """[N, K]"""

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """weight[n, k] = values[n, k] * scale[n // block[0], k // block[1]]"""

    values: Tensor
    """float8_e4m3fn [N, K]"""
    scale: Tensor
    """float32 [ceil(N / block[0]), ceil(K / block[1])]"""
    block: tuple[int, int]
    """(1, K): a scale for every output."""
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """weight[n, k] = values[n, k] * scale[n]"""

    values: Tensor
    """int8 [N, K]"""
    scale: Tensor
    """float32 [N]"""
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """weight[n, order[k]] = (codes[n, k] - zeros[g, n]) * scales[g, n], g = k // group_size"""

    codes: Tensor
    """uint8 [N, K], one code in a byte"""
    scales: Tensor
    """float [K / group_size, N]"""
    zeros: Tensor
    """int16 [K / group_size, N]"""
    bits: int
    """4 or 8"""
    group_size: int
    order: Tensor | None
    """int64 [K], inputs in the order of the codes (GPTQ's desc_act); None is their own."""
    dtype: torch.dtype


LinearWeight = DenseWeight | Fp8Weight | Int8Weight | GroupedWeight


def dequantise(weight: LinearWeight) -> Tensor:
    """[N, K] in the activations' dtype; computed in float32, rounded once."""
    match weight:
        case DenseWeight():
            return weight.weight
        case Fp8Weight(values, scale, (rows, columns)):
            num_rows, num_columns = values.shape
            spread = scale.repeat_interleave(rows, 0)[:num_rows]
            spread = spread.repeat_interleave(columns, 1)[:, :num_columns]
            return (values.float() * spread).to(weight.dtype)
        case Int8Weight(values, scale):
            return (values.float() * scale[:, None]).to(weight.dtype)
        case GroupedWeight():
            group = weight.group_size
            zeros = weight.zeros.t().float().repeat_interleave(group, 1)
            scales = weight.scales.t().float().repeat_interleave(group, 1)
            spread = ((weight.codes.float() - zeros) * scales).to(weight.dtype)
            if weight.order is None:
                return spread
            return torch.empty_like(spread).index_copy_(1, weight.order, spread)


def join(weights: Sequence[LinearWeight]) -> LinearWeight | None:
    """The weights of several products of one input as one, outputs side by side; None where their
    forms do not allow it."""
    first = weights[0]
    if len(weights) == 1:
        return first
    if isinstance(first, DenseWeight):
        dense = [weight.weight for weight in weights if isinstance(weight, DenseWeight)]
        return DenseWeight(torch.cat(dense)) if len(dense) == len(weights) else None
    if isinstance(first, Fp8Weight):
        return _join_fp8([weight for weight in weights if isinstance(weight, Fp8Weight)], weights)
    if isinstance(first, Int8Weight):
        int8 = [weight for weight in weights if isinstance(weight, Int8Weight)]
        if len(int8) < len(weights):
            return None
        values = torch.cat([weight.values for weight in int8])
        return replace(first, values=values, scale=torch.cat([weight.scale for weight in int8]))
    return _join_grouped(
        [weight for weight in weights if isinstance(weight, GroupedWeight)], weights
    )


def _join_fp8(fp8: list[Fp8Weight], weights: Sequence[LinearWeight]) -> Fp8Weight | None:
    block = fp8[0].block
    if len(fp8) < len(weights) or any(weight.block != block for weight in fp8):
        return None
    if any(len(weight.values) % block[0] for weight in fp8[:-1]):
        return None  # the next one's rows would begin inside a block of scales
    # Torch joins no float8: bytes are joined in their place.
    values = torch.cat([weight.values.view(torch.uint8) for weight in fp8])
    return replace(
        fp8[0],
        values=values.view(torch.float8_e4m3fn),
        scale=torch.cat([weight.scale for weight in fp8]),
    )


def _join_grouped(
    grouped: list[GroupedWeight], weights: Sequence[LinearWeight]
) -> GroupedWeight | None:
    first = grouped[0]
    if len(grouped) < len(weights):
        return None
    for weight in grouped[1:]:
        if (weight.bits, weight.group_size) != (first.bits, first.group_size):
            return None
        if not _same_order(weight.order, first.order):
            return None
    return replace(
        first,
        codes=torch.cat([weight.codes for weight in grouped]),
        scales=torch.cat([weight.scales for weight in grouped], dim=1),
        zeros=torch.cat([weight.zeros for weight in grouped], dim=1),
    )


def _same_order(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def quantise_int8(weight: Tensor) -> Int8Weight:
    """Symmetric, a scale for every output; weight [N, K]."""
    wide = weight.float()
    scale = wide.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / INT8_MAX
    values = (wide / scale[:, None]).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
    return Int8Weight(values, scale, weight.dtype)


def quantise_fp8(weight: Tensor) -> Fp8Weight:
    """A scale for every output; weight [N, K]."""
    wide = weight.float()
    scale = wide.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    scale = scale / FP8_MAX
    values = (wide / scale).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return Fp8Weight(values, scale, (1, weight.shape[1]), weight.dtype)
