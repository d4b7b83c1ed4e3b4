"""y[t, n] = scale[n] * sum over k of x[t, k] * w[n, k] + b[n], w int8, summed in float32.

An int8 is exact in bfloat16 and float16, so tiles are widened in registers and multiplied by the
matrix units; the scale is applied once, to the sum. Grid: tiles of N times tiles of T, those of one
strip of N side by side, so that a weight tile is read from memory once. Moves N K bytes of weight,
2 T K of tokens for each strip that the L2 does not hold, and writes 2 N T. N is cut finely for few
tokens: 4,096 outputs in strips of 32 keep 128 multiprocessors reading, with no second pass.

Fits inside a CUDA graph: no size is read from the device.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.aot import AotCase
from engine.kernels.linear.weights import Int8Weight
from engine.kernels.triton_tiles import (
    DETERMINISTIC_TOKENS,
    own_tile,
    plain_product,
    store_tile,
    tile_grid,
)
from engine.kernels.tuning import launch_config


@triton.jit
def multiply_kernel(
    x, weight, scale, bias, out, num_tokens, num_outputs, num_inputs, stride_x,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row, column, row_in, column_in = own_tile(num_tokens, num_outputs, BLOCK_M, BLOCK_N)
    total = plain_product(
        x, weight, row, column, row_in, column_in, num_inputs, stride_x, BLOCK_M, BLOCK_N, BLOCK_K
    )
    total *= tl.load(scale + column, mask=column_in, other=0.0)[None, :]
    store_tile(out, total, bias, row, column, row_in, column_in, num_outputs, HAS_BIAS)


def multiply(
    x: Tensor, weight: Int8Weight, bias: Tensor | None, *, deterministic: bool = False
) -> Tensor:
    """x [T, K], rows contiguous -> [T, N]; deterministic: launched alike for any T"""
    num_tokens, num_inputs = x.shape
    num_outputs = weight.values.shape[0]
    out = x.new_empty(num_tokens, num_outputs)
    if num_tokens == 0:
        return out
    size = DETERMINISTIC_TOKENS if deterministic else num_tokens
    config = launch_config("int8_linear", _shape_class(size), _default(size))
    multiply_kernel[tile_grid(num_tokens, num_outputs, config)](
        x, weight.values, weight.scale, bias, out, num_tokens, num_outputs, num_inputs, x.stride(0),
        HAS_BIAS=bias is not None, **config,
    )  # fmt: skip
    return out


def _shape_class(num_tokens: int) -> str:
    return "m16" if num_tokens <= 16 else "m64" if num_tokens <= 64 else "m128"


def _default(num_tokens: int) -> dict[str, int]:
    if num_tokens <= 16:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 256, "num_warps": 4, "num_stages": 4}
    if num_tokens <= 64:
        return {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}


AOT = [
    AotCase.launched(
        f"multiply_{dtype}_m{num_tokens}",
        multiply_kernel,
        dict.fromkeys(("x", "bias", "out"), f"*{dtype}")
        | {"weight": "*i8", "scale": "*fp32", "num_tokens": "i32"}
        | dict.fromkeys(("num_outputs", "num_inputs", "stride_x"), "i32:16"),
        {"HAS_BIAS": True},
        _default(num_tokens),
    )
    for dtype in ("bf16", "fp16")
    for num_tokens in (16, 64, 128)
]
