"""y = x W^T + b with the weight in int8, a scale for every output; activations stay as they are.

Knows no checkpoint.

On a GPU the weight is read as int8 and widened in registers: half the bytes of bfloat16, which is
what a decode waits for. On a CPU the products of a few rows read int8 through a kernel of our own,
larger batches a dense copy that is kept beside it: widening costs more than it saves where a weight
in the cache serves many rows.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from engine.kernels.linear import cpu as cpu_linear
from engine.kernels.linear.weights import Int8Weight

CPU_ROWS = 4
"""Up to so many rows the product in int8 is the faster one."""


def pack(
    weight: Int8Weight, bias: Tensor | None, *, deterministic: bool = False
) -> Callable[[Tensor], Tensor]:
    """Through the Triton kernel."""
    from engine.kernels.linear import int8_triton as int8_linear_triton

    num_outputs, num_inputs = weight.values.shape

    def product(x: Tensor) -> Tensor:
        rows = x.reshape(-1, num_inputs)
        y = int8_linear_triton.multiply(rows, weight, bias, deterministic=deterministic)
        return y.view(*x.shape[:-1], num_outputs)

    return product


def cpu_keeps(weight: Int8Weight) -> bool:
    """Whether a copy in int8 pays beside the dense one."""
    return cpu_linear.cpu_multiplies(weight.dtype, weight.values.shape[1], weight.values.device)


def pack_cpu(
    weight: Int8Weight, bias: Tensor | None, dense: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """`dense` multiplies what int8 is not faster at."""
    few = cpu_linear.pack_int8(weight, bias)

    def product(x: Tensor) -> Tensor:
        return few(x) if x.numel() <= CPU_ROWS * x.shape[-1] else dense(x)

    return product
