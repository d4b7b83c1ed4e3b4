"""y[t, n] = sum over groups g of s[g, n] * (sum over k in g of x[t, k] * (c[n, k] - z[g, n])) + b.

A code less its zero point is a small integer, exact in bfloat16 and float16 (9 bits at most), so
it is what the matrix units multiply; scales meet the float32 sums of a group. The codes' layout is
that of `int4_linear.py`. Grid: tiles of N times tiles of T, those of one strip of N side by side.
Moves N K / 2 bytes of codes, 4 (scale) or 2 and 2 (zero) bytes for each group of an output, 2 T K
of tokens for each strip of N that the L2 does not hold, and writes 2 N T.

Fits inside a CUDA graph: no size is read from the device.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.aot import AotCase
from engine.kernels.triton_tiles import (
    DETERMINISTIC_TOKENS,
    own_tile,
    span_product,
    store_tile,
    tile_grid,
)
from engine.kernels.tuning import launch_config


@triton.jit
def multiply_kernel(
    x, codes, scales, zeros, bias, out, num_tokens, num_outputs, num_spans, stride_x,
    BITS: tl.constexpr, SPAN: tl.constexpr, SPANS_PER_GROUP: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, column, row_in, column_in = own_tile(num_tokens, num_outputs, BLOCK_M, BLOCK_N)
    BYTES: tl.constexpr = SPAN * BITS // 8
    inner = tl.arange(0, BYTES)
    x_at = x + row[:, None] * stride_x + inner[None, :]
    c_at = codes + column[None, :].to(tl.int64) * (num_spans * BYTES) + inner[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for span in range(num_spans):
        group_at = (span // SPANS_PER_GROUP) * num_outputs + column
        total += span_product(
            x_at, c_at, scales + group_at, zeros + group_at, row_in, column_in, BITS, BYTES
        )
        x_at += SPAN
        c_at += BYTES
    store_tile(out, total, bias, row, column, row_in, column_in, num_outputs, HAS_BIAS)


def multiply(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bias: Tensor | None,
    *,
    bits: int,
    span: int,
    spans_per_group: int,
    deterministic: bool = False,
) -> Tensor:
    """x [T, K], rows contiguous; codes uint8 [N, K * bits / 8]; scales, zeros [groups, N].
    deterministic: launched alike for any T."""
    num_tokens, num_inputs = x.shape
    num_outputs = codes.shape[0]
    out = x.new_empty(num_tokens, num_outputs)
    if num_tokens == 0:
        return out
    size = DETERMINISTIC_TOKENS if deterministic else num_tokens
    config = launch_config("int4_linear", _shape_class(size), _default(size))
    multiply_kernel[tile_grid(num_tokens, num_outputs, config)](
        x, codes, scales, zeros, bias, out, num_tokens, num_outputs, num_inputs // span,
        x.stride(0), BITS=bits, SPAN=span, SPANS_PER_GROUP=spans_per_group,
        HAS_BIAS=bias is not None, **config,
    )  # fmt: skip
    return out


def _shape_class(num_tokens: int) -> str:
    return "m16" if num_tokens <= 16 else "m64"


def _default(num_tokens: int) -> dict[str, int]:
    if num_tokens <= 16:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 5}
    return {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3}


AOT = [
    AotCase.launched(
        f"multiply_{dtype}_int{bits}_span{span}_m{num_tokens}",
        multiply_kernel,
        dict.fromkeys(("x", "bias", "out"), f"*{dtype}")
        | {"codes": "*u8", "scales": "*fp16", "zeros": "*i16"}
        | {"num_tokens": "i32", "num_outputs": "i32:16", "num_spans": "i32", "stride_x": "i32:16"},
        {"BITS": bits, "SPAN": span, "SPANS_PER_GROUP": 1, "HAS_BIAS": True},
        _default(num_tokens),
    )
    for dtype in ("bf16", "fp16")
    for bits, span in ((4, 128), (4, 32), (8, 128))
    for num_tokens in (16, 64)
]
