"""Two launches for all adapters of a batch.

shrink: u[p, t, :] = A_s x[t] over the p-th part of K; grid: tiles of rows, blocks of A's rows,
    parts of K. Parts keep many multiprocessors at work where few rows decode, and are summed in
    order by the second kernel: the result does not depend on the batch.
expand: y[t, n] += B_s (sum over p of u[p, t, :]); grid: tiles of rows, blocks of N, projections.

A tile has rows of one adapter. Tiles that nobody uses leave at once, so grids follow from upper
bounds and both fit inside a CUDA graph. Moved are A and B of the adapters in use once for each tile
(from the L2 after the first), x, u twice (4 bytes an element), and y twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.aot import AotCase
from engine.kernels.mixture.types import BLOCK_M, LoraRows, LoraStack
from engine.kernels.tuning import launch_config

PART_INPUTS = 512
"""Least inputs that are worth a part of their own."""
MAX_PARTS = 8


@triton.jit
def shrink_kernel(
    x, a, out, rows, tile_slots, num_rows, num_outputs, num_inputs, part_inputs, stride_x,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    slot = tl.load(tile_slots + tl.program_id(0))
    if slot < 0:
        return
    row = tl.load(rows + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_in, column_in = row >= 0, column < num_outputs
    part = tl.program_id(2)
    first = part * part_inputs
    last = tl.minimum(first + part_inputs, num_inputs)
    inner = tl.arange(0, BLOCK_K)
    a += slot.to(tl.int64) * num_outputs * num_inputs
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(first, last, BLOCK_K):
        at = start + inner
        mask = row_in[:, None] & (at < last)[None, :]
        left = tl.load(x + row[:, None] * stride_x + at[None, :], mask=mask, other=0.0)
        mask = column_in[None, :] & (at < last)[:, None]
        right = tl.load(a + column[None, :] * num_inputs + at[:, None], mask=mask, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    at = (part * num_rows + row[:, None]) * num_outputs + column[None, :]
    tl.store(out + at, total, mask=row_in[:, None] & column_in[None, :])


@triton.jit
def expand_kernel(
    y, shrunk, b, part_ends, rows, tile_slots, num_rows, num_outputs, stride_y, PARTS: tl.constexpr,
    PROJECTIONS: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    slot = tl.load(tile_slots + tl.program_id(0))
    if slot < 0:
        return
    projection = tl.program_id(2)
    start = tl.load(part_ends + projection - 1, mask=projection > 0, other=0)
    end = tl.load(part_ends + projection)
    column = start + tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.load(rows + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    row_in, column_in = row >= 0, column < end
    inner = tl.arange(0, RANK)
    u_at = row[:, None] * (PROJECTIONS * RANK) + projection * RANK + inner[None, :]
    u = tl.zeros([BLOCK_M, RANK], tl.float32)
    for part in tl.static_range(PARTS):
        offset = part * num_rows * PROJECTIONS * RANK
        u += tl.load(shrunk + offset + u_at, mask=row_in[:, None], other=0.0)
    b_at = b + slot.to(tl.int64) * num_outputs * RANK + column[None, :] * RANK + inner[:, None]
    right = tl.load(b_at, mask=column_in[None, :], other=0.0)
    delta = tl.dot(u.to(right.dtype), right, input_precision="ieee")
    at = y + row[:, None] * stride_y + column[None, :]
    mask = row_in[:, None] & column_in[None, :]
    total = tl.load(at, mask=mask, other=0.0).to(tl.float32) + delta
    tl.store(at, total.to(y.dtype.element_ty), mask=mask)


def add(y: Tensor, x: Tensor, stack: LoraStack, rows: LoraRows) -> None:
    """See `lora.add_lora`; rows of x and of y are contiguous."""
    num_rows, num_inputs = x.shape
    width, rank, projections = stack.a.shape[1], stack.rank, len(stack.part_ends)
    parts = max(1, min(MAX_PARTS, num_inputs // PART_INPUTS))
    config = launch_config("lora", f"r{rank}", _default(rank))
    shrunk = x.new_empty(parts, num_rows, width, dtype=torch.float32)
    shrink_kernel[rows.tiles, triton.cdiv(width, config["SHRINK_N"]), parts](
        x, stack.a, shrunk, rows.rows, rows.tile_slots, num_rows, width, num_inputs,
        _part_inputs(num_inputs, parts, config["SHRINK_K"]), x.stride(0), BLOCK_M=BLOCK_M,
        BLOCK_N=config["SHRINK_N"], BLOCK_K=config["SHRINK_K"],
    )  # fmt: skip
    starts = (0, *stack.part_ends)
    widest = max(end - start for start, end in zip(starts, stack.part_ends, strict=False))
    expand_kernel[rows.tiles, triton.cdiv(widest, config["EXPAND_N"]), projections](
        y, shrunk, stack.b, stack.part_ends_on_device, rows.rows, rows.tile_slots, num_rows,
        stack.b.shape[1], y.stride(0), PARTS=parts, PROJECTIONS=projections, RANK=rank,
        BLOCK_M=BLOCK_M, BLOCK_N=config["EXPAND_N"],
    )  # fmt: skip


def _part_inputs(num_inputs: int, parts: int, block: int) -> int:
    return -(-num_inputs // (parts * block)) * block


def _default(rank: int) -> dict[str, int]:
    return {"SHRINK_N": 16, "SHRINK_K": 128, "EXPAND_N": 128 if rank <= 64 else 64}


def _aot() -> list[AotCase]:
    listed = []
    for dtype in ("bf16", "fp16"):
        constexprs = {"BLOCK_M": BLOCK_M, "BLOCK_N": 16, "BLOCK_K": 128}
        signature = {
            "x": f"*{dtype}",
            "a": f"*{dtype}",
            "out": "*fp32",
            "rows": "*i32",
            "tile_slots": "*i32",
            "num_rows": "i32",
            "num_outputs": "i32:16",
            "num_inputs": "i32:16",
            "part_inputs": "i32:16",
            "stride_x": "i32:16",
        }
        listed.append(AotCase(f"shrink_{dtype}", shrink_kernel, signature, constexprs))
        for rank in (16, 64, 128):
            constexprs = {
                "PARTS": MAX_PARTS,
                "PROJECTIONS": 3,
                "RANK": rank,
                "BLOCK_M": BLOCK_M,
                "BLOCK_N": _default(rank)["EXPAND_N"],
            }
            signature = {
                "y": f"*{dtype}",
                "shrunk": "*fp32",
                "b": f"*{dtype}",
                "part_ends": "*i32",
                "rows": "*i32",
                "tile_slots": "*i32",
                "num_rows": "i32",
                "num_outputs": "i32:16",
                "stride_y": "i32:16",
            }
            listed.append(AotCase(f"expand_{dtype}_{rank}", expand_kernel, signature, constexprs))
    return listed


AOT = _aot()
