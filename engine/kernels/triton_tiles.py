"""Defines what the linear layers' Triton kernels share: which tile is whose, its product, its way
out.

A product is cut into tiles of BLOCK_M rows (tokens) and BLOCK_N columns (outputs), one program
each, those of one strip of columns side by side, so that a weight tile is read from memory once.
Functions here are inlined where they are called and cost nothing of their own.

No kernel stands here, and so nothing that is compiled for itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

DETERMINISTIC_TOKENS = 64
"""As many as a launch is made for when it must not depend on how many there are."""


def tile_grid(num_rows: int, num_columns: int, config: dict[str, int]) -> tuple[int]:
    """A program for each tile; `config` as `tuning.launch_config` gives it."""
    return (triton.cdiv(num_rows, config["BLOCK_M"]) * triton.cdiv(num_columns, config["BLOCK_N"]),)


@triton.jit
def own_tile(num_rows, num_columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """row int64 [BLOCK_M] and column [BLOCK_N] of this program, and which of them there are."""
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    row = (tl.program_id(0) % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (tl.program_id(0) // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    return row.to(tl.int64), column, row < num_rows, column < num_columns


@triton.jit
def plain_product(
    x, weight, row, column, row_in, column_in, num_inputs, stride_x, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows of x times rows of a weight [N, K] that x's type can hold: float32 [BLOCK_M, BLOCK_N],
    K walked in steps of BLOCK_K from the front."""
    inner = tl.arange(0, BLOCK_K)
    x_at = x + row[:, None] * stride_x + inner[None, :]
    w_at = weight + column[None, :].to(tl.int64) * num_inputs + inner[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(tl.cdiv(num_inputs, BLOCK_K)):
        left = num_inputs - step * BLOCK_K
        a = tl.load(x_at, mask=row_in[:, None] & (inner[None, :] < left), other=0.0)
        b = tl.load(w_at, mask=column_in[None, :] & (inner[:, None] < left), other=0)
        total = tl.dot(a, b.to(a.dtype), total, input_precision="ieee")
        x_at += BLOCK_K
        w_at += BLOCK_K
    return total


@triton.jit
def span_product(
    x_at, c_at, scales_at, zeros_at, row_in, column_in, BITS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Return the product of one span of grouped codes, scaled: float32 [BLOCK_M, BLOCK_N]. x_at
    [BLOCK_M, BYTES] and c_at [BYTES, BLOCK_N]: where the span begins; of 4 bits, a byte's high ones
    are the code of the input BYTES further on. scales_at and zeros_at [BLOCK_N]: of the group that
    it is in.
    """
    zero = tl.load(zeros_at, mask=column_in, other=0)[None, :]
    scale = tl.load(scales_at, mask=column_in, other=0.0).to(tl.float32)
    byte = tl.load(c_at, mask=column_in[None, :], other=0).to(tl.int16)
    a = tl.load(x_at, mask=row_in[:, None], other=0.0)
    if BITS == 4:
        part = tl.dot(a, ((byte & 15) - zero).to(a.dtype), input_precision="ieee")
        a = tl.load(x_at + BYTES, mask=row_in[:, None], other=0.0)
        part = tl.dot(a, ((byte >> 4) - zero).to(a.dtype), part, input_precision="ieee")
    else:
        part = tl.dot(a, (byte - zero).to(a.dtype), input_precision="ieee")
    return part * scale[None, :]


@triton.jit
def store_tile(
    out, total, bias, row, column, row_in, column_in, num_columns, HAS_BIAS: tl.constexpr
):
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column_in, other=0.0).to(tl.float32)[None, :]
    at = row[:, None] * num_columns + column[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=row_in[:, None] & column_in[None, :])
