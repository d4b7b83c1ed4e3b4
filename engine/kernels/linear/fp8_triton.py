"""Float8 for linear layers: quantising tokens, and a product with a scale for every block.

quantise: s[t, g] = max |x[t, group g]| / 448, q = x / s. Grid (T, groups). Moves each x twice at
most (the second time from the cache where a group is a whole row) and writes K bytes a token.

multiply: y[t, n] = sum over g of sx[t, g] * sw[n / rows, g] * (q[t, group g] . w[n, group g]) + b.
Every group's product runs in float8 and is scaled in float32 outside. Grid: tiles of N times tiles
of T, those of one strip of N side by side, so that a weight tile is read from memory once. Moves
N K bytes of weight, T K of tokens for each strip of N that the L2 does not hold, and writes 2 N T.

Fits inside a CUDA graph: no size is read from the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.aot import AotCase
from engine.kernels.linear.weights import Fp8Weight
from engine.kernels.triton_tiles import DETERMINISTIC_TOKENS, own_tile, store_tile, tile_grid
from engine.kernels.tuning import launch_config

FP8_MAX = tl.constexpr(448.0)
MIN_SCALE = tl.constexpr(1e-12)
QUANTISE_TILE = 1024
GROUP_TILE = 128
"""Inputs of one dot where a group is a whole row."""


@triton.jit
def round_to_e4m3(x):
    """float32 rounded to the 3 bits of mantissa that e4m3 keeps, ties to even, so that converting
    it is exact. Triton's interpreter loses the carry of 127 to 128 when it rounds by itself."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    return tl.where(tl.abs(x) < 0.015625, x, bits.to(tl.float32, bitcast=True))


@triton.jit
def quantise_kernel(
    x, values, scales, num_inputs, stride_x, num_groups, GROUP: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    first = group * GROUP
    last = tl.minimum(first + GROUP, num_inputs)
    largest = tl.zeros([TILE], tl.float32)
    for start in range(first, last, TILE):
        at = start + tl.arange(0, TILE)
        part = tl.load(x + row * stride_x + at, mask=at < last, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(part))
    scale = tl.maximum(tl.max(largest, axis=0) / FP8_MAX, MIN_SCALE)
    tl.store(scales + row * num_groups + group, scale)
    for start in range(first, last, TILE):
        at = start + tl.arange(0, TILE)
        part = tl.load(x + row * stride_x + at, mask=at < last, other=0.0).to(tl.float32)
        part = round_to_e4m3(tl.clamp(part / scale, -FP8_MAX, FP8_MAX))
        tl.store(values + row * num_inputs + at, part.to(values.dtype.element_ty), mask=at < last)


@triton.jit
def multiply_kernel(
    q, q_scales, weight, w_scales, bias, out, num_tokens, num_outputs, num_inputs, num_groups,
    ROWS: tl.constexpr, GROUP_STEPS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """GROUP_STEPS: dots of BLOCK_K that share their scales; 0: all of them do."""
    row, column, row_in, column_in = own_tile(num_tokens, num_outputs, BLOCK_M, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    q_at = q + row[:, None] * num_inputs + inner[None, :]
    w_at = weight + column[None, :].to(tl.int64) * num_inputs + inner[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(tl.cdiv(num_inputs, BLOCK_K)):
        left = num_inputs - step * BLOCK_K
        a = tl.load(q_at, mask=row_in[:, None] & (inner[None, :] < left), other=0.0)
        b = tl.load(w_at, mask=column_in[None, :] & (inner[:, None] < left), other=0.0)
        if GROUP_STEPS == 0:
            total = tl.dot(a, b, total)
        else:
            group = step // GROUP_STEPS
            sa = tl.load(q_scales + row * num_groups + group, mask=row_in, other=0.0)
            sb = tl.load(
                w_scales + (column // ROWS) * num_groups + group, mask=column_in, other=0.0
            )
            total += tl.dot(a, b) * sa[:, None] * sb[None, :]
        q_at += BLOCK_K
        w_at += BLOCK_K
    if GROUP_STEPS == 0:
        sa = tl.load(q_scales + row, mask=row_in, other=0.0)
        sb = tl.load(w_scales + column // ROWS, mask=column_in, other=0.0)
        total = total * sa[:, None] * sb[None, :]
    store_tile(out, total, bias, row, column, row_in, column_in, num_outputs, HAS_BIAS)


def quantise(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """See `fp8_linear.quantise_tokens`."""
    num_tokens, num_inputs = x.shape
    num_groups = -(-num_inputs // group_size)
    values = x.new_empty(num_tokens, num_inputs, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(num_tokens, num_groups, dtype=torch.float32)
    tile = min(QUANTISE_TILE, triton.next_power_of_2(group_size))
    if num_tokens:
        quantise_kernel[num_tokens, num_groups](
            x, values, scales, num_inputs, x.stride(0), num_groups, GROUP=group_size, TILE=tile
        )
    return values, scales


def multiply(
    values: Tensor,
    scales: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    deterministic: bool = False,
) -> Tensor:
    """[T, K] float8 with scales [T, groups] times the weight: [T, N]. The groups of the tokens are
    the columns of the weight's blocks. deterministic: launched alike for any T."""
    num_tokens, num_inputs = values.shape
    num_outputs = weight.values.shape[0]
    out = values.new_empty(num_tokens, num_outputs, dtype=dtype)
    if num_tokens == 0:
        return out
    rows, group = weight.block
    whole_rows = group >= num_inputs
    inner = GROUP_TILE if whole_rows else min(group, GROUP_TILE)
    size = DETERMINISTIC_TOKENS if deterministic else num_tokens
    config = launch_config("fp8_linear", _shape_class(size), _default(size))
    multiply_kernel[tile_grid(num_tokens, num_outputs, config)](
        values, scales, weight.values, weight.scale, bias, out, num_tokens, num_outputs, num_inputs,
        scales.shape[1], ROWS=rows, GROUP_STEPS=0 if whole_rows else group // inner,
        HAS_BIAS=bias is not None, BLOCK_K=inner, **config,
    )  # fmt: skip
    return out


def _shape_class(num_tokens: int) -> str:
    return "m16" if num_tokens <= 16 else "m64" if num_tokens <= 64 else "m128"


def _default(num_tokens: int) -> dict[str, int]:
    if num_tokens <= 16:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 5}
    if num_tokens <= 64:
        return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 4}
    return {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3}


AOT = [
    AotCase(
        f"quantise_{dtype}_group{group}",
        quantise_kernel,
        {"x": f"*{dtype}", "values": "*fp8e4nv", "scales": "*fp32", "num_groups": "i32"}
        | dict.fromkeys(("num_inputs", "stride_x"), "i32:16"),
        {"GROUP": group, "TILE": min(group, QUANTISE_TILE)},
    )
    for dtype in ("bf16", "fp16")
    for group in (128, 4096)
] + [
    AotCase.launched(
        f"multiply_m{num_tokens}_rows{rows}",
        multiply_kernel,
        dict.fromkeys(("q", "weight"), "*fp8e4nv")
        | dict.fromkeys(("q_scales", "w_scales"), "*fp32")
        | dict.fromkeys(("bias", "out"), "*bf16")
        | dict.fromkeys(("num_tokens", "num_groups"), "i32")
        | dict.fromkeys(("num_outputs", "num_inputs"), "i32:16"),
        {"ROWS": rows, "GROUP_STEPS": steps, "HAS_BIAS": True, "BLOCK_K": GROUP_TILE},
        _default(num_tokens),
    )
    for rows, steps in ((128, 1), (1, 0))
    for num_tokens in (16, 64, 128)
]
