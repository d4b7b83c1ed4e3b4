"""y = x W^T + b with 4-bit (or 8-bit) codes, a scale and a zero point for every group of inputs.

Knows no checkpoint: AWQ and GPTQ are one form here, `linear_weights.GroupedWeight`. Activations
stay as they are. Where no kernel reads the codes, `linear_weights.dequantise` makes the weight
dense at load.

Packed form, for bits = 4: groups are cut into spans of at most 128 inputs; byte j of a span of S
holds code j in its low half and code S / 2 + j in its high half, so that the two halves of a byte
meet two contiguous halves of the inputs, and nothing is interleaved in registers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.kernels.backend import uses_triton
from engine.kernels.linear.weights import GroupedWeight

MAX_SPAN = 128
MIN_SPAN = 32
"""A dot takes at least 16 inputs, and a span of 4-bit codes is two dots."""


def keeps(weight: GroupedWeight) -> bool:
    """Whether the kernel reads this weight's groups."""
    return uses_triton(weight.codes.device) and span_of(weight.group_size) >= MIN_SPAN


def span_of(group_size: int) -> int:
    """The largest power of two, at most MAX_SPAN, that a group is made of."""
    return min(MAX_SPAN, group_size & -group_size)


def pack(
    weight: GroupedWeight, bias: Tensor | None, *, deterministic: bool = False
) -> Callable[[Tensor], Tensor]:
    from engine.kernels.linear import int4_triton as int4_linear_triton

    """Return the product of rows [T, K]."""
    packed = pack_codes(weight)
    scales, zeros = weight.scales.contiguous(), weight.zeros.contiguous()
    order, span, bits = weight.order, span_of(weight.group_size), weight.bits
    spans_per_group = weight.group_size // span

    def product(x: Tensor) -> Tensor:
        return int4_linear_triton.multiply(
            x if order is None else x.index_select(1, order),
            packed,
            scales,
            zeros,
            bias,
            bits=bits,
            span=span,
            spans_per_group=spans_per_group,
            deterministic=deterministic,
        )

    return product


def pack_codes(weight: GroupedWeight) -> Tensor:
    """uint8 [N, K * bits / 8]"""
    if weight.bits == 8:
        return weight.codes.contiguous()
    num_outputs, num_inputs = weight.codes.shape
    span = span_of(weight.group_size)
    halves = weight.codes.view(num_outputs, num_inputs // span, 2, span // 2)
    packed = halves[:, :, 0] | (halves[:, :, 1] << 4)
    return packed.reshape(num_outputs, num_inputs // 2).to(torch.uint8)
