"""y[t, n] = scale[n] * sum over k of x[t, k] * w[n, k] + b[n], w int8, summed in float32.

An int8 is exact in bfloat16 and float16, so tiles are widened in registers and multiplied by the
matrix units; the scale is applied once, to the sum. Grid: tiles of N times tiles of T, those of one
strip of N side by side, so that a weight tile is read from memory once. Moves N K bytes of weight,
2 T K of tokens for each strip that the L2 does not hold, and writes 2 N T. N is cut finely for few
tokens: 4,096 outputs in strips of 32 keep 128 multiprocessors reading, with no second pass.

Above: `int8_linear.py`. Below: triton. Fits inside a CUDA graph: no size is read from the device.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.aot import AotCase
from engine.kernels.linear_weights import Int8Weight
from engine.kernels.tuning import launch_config

DETERMINISTIC_TOKENS = 64
"""As many as a launch is made for when it must not depend on how many there are."""


@triton.jit
def multiply_kernel(
    x,
    weight,
    scale,
    bias,
    out,
    num_tokens,
    num_outputs,
    num_inputs,
    stride_x,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_m = tl.cdiv(num_tokens, BLOCK_M)
    row = (tl.program_id(0) % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (tl.program_id(0) // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_in, column_in = row < num_tokens, column < num_outputs
    row64 = row.to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    x_at = x + row64[:, None] * stride_x + inner[None, :]
    w_at = weight + column[None, :].to(tl.int64) * num_inputs + inner[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(tl.cdiv(num_inputs, BLOCK_K)):
        left = num_inputs - step * BLOCK_K
        a = tl.load(x_at, mask=row_in[:, None] & (inner[None, :] < left), other=0.0)
        b = tl.load(w_at, mask=column_in[None, :] & (inner[:, None] < left), other=0)
        total = tl.dot(a, b.to(a.dtype), total, input_precision="ieee")
        x_at += BLOCK_K
        w_at += BLOCK_K
    total *= tl.load(scale + column, mask=column_in, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column_in, other=0.0).to(tl.float32)[None, :]
    at = row64[:, None] * num_outputs + column[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=row_in[:, None] & column_in[None, :])


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
    grid = (
        triton.cdiv(num_tokens, config["BLOCK_M"]) * triton.cdiv(num_outputs, config["BLOCK_N"]),
    )
    multiply_kernel[grid](
        x,
        weight.values,
        weight.scale,
        bias,
        out,
        num_tokens,
        num_outputs,
        num_inputs,
        x.stride(0),
        HAS_BIAS=bias is not None,
        **config,
    )
    return out


def _shape_class(num_tokens: int) -> str:
    return "m16" if num_tokens <= 16 else "m64" if num_tokens <= 64 else "m128"


def _default(num_tokens: int) -> dict[str, int]:
    if num_tokens <= 16:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 256, "num_warps": 4, "num_stages": 4}
    if num_tokens <= 64:
        return {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}


def _aot() -> list[AotCase]:
    listed = []
    for dtype in ("bf16", "fp16"):
        for num_tokens in (16, 64, 128):
            signature = {
                "x": f"*{dtype}",
                "weight": "*i8",
                "scale": "*fp32",
                "bias": f"*{dtype}",
                "out": f"*{dtype}",
                "num_tokens": "i32",
                "num_outputs": "i32:16",
                "num_inputs": "i32:16",
                "stride_x": "i32:16",
            }
            listed.append(
                AotCase.launched(
                    f"multiply_{dtype}_m{num_tokens}",
                    multiply_kernel,
                    signature,
                    {"HAS_BIAS": True},
                    _default(num_tokens),
                )
            )
    return listed


AOT = _aot()
