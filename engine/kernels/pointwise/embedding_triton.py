"""Gather of embedding rows with the vocabulary's mask in the same pass.

    out[t] = table[id_t - first]   if 0 <= id_t - first < rows, else 0

Grid (T, hidden / BLOCK). Bytes: 2 * T * hidden elements; rows that lie elsewhere are not read.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.aot import AotCase
from engine.kernels.tuning import launch_config


@triton.jit
def _gather_kernel(
    ids_ptr, table_ptr, out_ptr, first, rows, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """ids int64 [T]; table [rows, SIZE] and out [T, SIZE] contiguous."""
    token = tl.program_id(0).to(tl.int64)
    local = tl.load(ids_ptr + token) - first
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < SIZE
    held = (local >= 0) & (local < rows)
    value = tl.load(table_ptr + local * SIZE + channel, mask=inside & held, other=0.0)
    tl.store(out_ptr + token * SIZE + channel, value, mask=inside)


def gather_rows(token_ids: Tensor, table: Tensor, first: int, out: Tensor | None = None) -> Tensor:
    """As `engine.kernels.pointwise.embedding.gather_rows`; `out` contiguous [T, hidden]."""
    assert table.is_contiguous() and token_ids.is_contiguous()
    rows, size = table.shape
    count = token_ids.shape[0]
    out = table.new_empty(count, size) if out is None else out
    if count == 0:
        return out
    config = launch_config("embedding", f"size{size}", {"BLOCK": 1024, "num_warps": 4})
    grid = (count, triton.cdiv(size, config["BLOCK"]))
    _gather_kernel[grid](token_ids, table, out, first, rows, SIZE=size, **config)
    return out


def _aot(size: int, dtype: str) -> AotCase:
    return AotCase(
        name=f"embedding {size} {dtype}",
        kernel=_gather_kernel,
        signature={
            "ids_ptr": "*i64",
            "table_ptr": f"*{dtype}",
            "out_ptr": f"*{dtype}",
            "first": "i32",
            "rows": "i32",
        },
        constexprs={"SIZE": size, "BLOCK": 1024},
    )


AOT = [
    *(_aot(size, "bf16") for size in (576, 4096, 8192)),
    *(_aot(4096, dtype) for dtype in ("fp16", "fp32")),
]
