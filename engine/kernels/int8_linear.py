"""y = x W^T + b with the weight in int8, a scale for every output; activations stay as they are.

Above: `kernels/linear.py`. Below: `int8_linear_triton.py`, torch. Knows no checkpoint.

On a GPU the weight is read as int8 and widened in registers: half the bytes of bfloat16, which is
what a decode waits for. On a CPU the products of a few bfloat16 rows read int8
(`_weight_int8pack_mm`: 1.1-1.3 times faster than bfloat16 at one or two rows and one thread of an
AVX-512 machine, slower from four on; oneDNN's int8 product refuses that machine), larger batches a
bfloat16 copy that is kept beside it. In float32 only the copy is kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.kernels.linear_weights import Int8Weight

CPU_ROWS = 2
"""Up to so many rows torch's int8 product is the faster one."""


def pack(
    weight: Int8Weight, bias: Tensor | None, *, deterministic: bool = False
) -> Callable[[Tensor], Tensor]:
    """Through the Triton kernel."""
    from engine.kernels import int8_linear_triton

    num_outputs, num_inputs = weight.values.shape

    def product(x: Tensor) -> Tensor:
        rows = x.reshape(-1, num_inputs)
        y = int8_linear_triton.multiply(rows, weight, bias, deterministic=deterministic)
        return y.view(*x.shape[:-1], num_outputs)

    return product


def cpu_keeps(weight: Int8Weight) -> bool:
    """Whether a copy in int8 pays beside the dense one; torch's kernel wants blocks of 16."""
    sizes = weight.values.shape
    return weight.dtype == torch.bfloat16 and not any(size % 16 for size in sizes)


def pack_cpu(
    weight: Int8Weight, bias: Tensor | None, dense: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """`dense` multiplies what int8 is not faster at."""
    values, scale = weight.values.contiguous(), weight.scale.to(weight.dtype)

    def product(x: Tensor) -> Tensor:
        if x.numel() > CPU_ROWS * x.shape[-1]:
            return dense(x)
        y = torch.ops.aten._weight_int8pack_mm(x.reshape(-1, x.shape[-1]), values, scale)
        return (y if bias is None else y + bias).view(*x.shape[:-1], len(values))

    return product
