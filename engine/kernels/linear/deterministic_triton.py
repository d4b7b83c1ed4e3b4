"""y[t, n] = sum over k of x[t, k] * w[n, k] + b[n], summed in float32 in one order for any T.

The launch depends on the weight's shape and dtype alone: one tile, no split of K, K walked in steps
of BLOCK_K from the front. So an output's sums are the same instructions in the same order whatever
else is in the batch; rows that are not there are zeros. Grid: tiles of N times tiles of T, those of
one strip of N side by side, so that a weight tile is read from memory once. Moves 2 N K bytes of
weight (4 in float32), 2 T K of tokens for each strip of N that the L2 does not hold, and writes
2 N T. N is cut finely where it is small: 4,096 outputs in strips of 32 keep 128 multiprocessors
reading. BLOCK_M is what one group of warps multiplies at once on Hopper (wgmma, 64 rows).

Fits inside a CUDA graph: no size is read from the device.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.aot import AotCase
from engine.kernels.triton_tiles import own_tile, plain_product, store_tile, tile_grid
from engine.kernels.tuning import launch_config

NARROW = 8192
"""Outputs; more are enough strips of their own."""


@triton.jit
def multiply_kernel(
    x, weight, bias, out, num_tokens, num_outputs, num_inputs, stride_x, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row, column, row_in, column_in = own_tile(num_tokens, num_outputs, BLOCK_M, BLOCK_N)
    total = plain_product(
        x, weight, row, column, row_in, column_in, num_inputs, stride_x, BLOCK_M, BLOCK_N, BLOCK_K
    )
    store_tile(out, total, bias, row, column, row_in, column_in, num_outputs, HAS_BIAS)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K], rows contiguous, times weight [N, K]: [T, N]"""
    num_tokens, num_inputs = x.shape
    num_outputs = weight.shape[0]
    if x.stride(1) != 1:
        x = x.contiguous()
    out = x.new_empty(num_tokens, num_outputs)
    if num_tokens == 0:
        return out
    shape_class = _shape_class(num_outputs, x.element_size())
    config = launch_config("deterministic_linear", shape_class, _DEFAULTS[shape_class])
    multiply_kernel[tile_grid(num_tokens, num_outputs, config)](
        x, weight, bias, out, num_tokens, num_outputs, num_inputs, x.stride(0),
        HAS_BIAS=bias is not None, **config,
    )  # fmt: skip
    return out


def _shape_class(num_outputs: int, element_size: int) -> str:
    """Return the shape class of the weight; the tokens have no say."""
    if element_size > 2:
        return "float32"
    return "narrow" if num_outputs <= NARROW else "wide"


_DEFAULTS = {
    "narrow": {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4},
    "wide": {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4},
    "float32": {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3},
}


AOT = [
    AotCase.launched(
        f"multiply_{dtype}_{shape_class}",
        multiply_kernel,
        dict.fromkeys(("x", "weight", "bias", "out"), f"*{dtype}")
        | dict.fromkeys(("num_outputs", "num_inputs", "stride_x"), "i32:16")
        | {"num_tokens": "i32"},
        {"HAS_BIAS": True},
        config,
    )
    for dtype in ("bf16", "fp16", "fp32")
    for shape_class, config in _DEFAULTS.items()
    if (shape_class == "float32") == (dtype == "fp32")
]
