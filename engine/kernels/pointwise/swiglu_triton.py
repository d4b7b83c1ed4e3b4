"""silu(gate) * up in one pass, in float32 and rounded once.

Grid (T, I / BLOCK): each program a piece of a row. Bytes: 3 * T * I elements, two read and one
written.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.aot import AotCase
from engine.kernels.tuning import launch_config


@triton.jit
def _swiglu_kernel(gate_up_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """gate_up contiguous [T, 2 * SIZE], out contiguous [T, SIZE]."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < SIZE
    gate_ptr = gate_up_ptr + row * (2 * SIZE) + channel
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + SIZE, mask=inside, other=0.0).to(tl.float32)
    small = tl.exp(-tl.abs(gate))  # exp(-gate) would overflow
    out = gate * (tl.where(gate >= 0, 1.0, small) / (1.0 + small)) * up
    tl.store(out_ptr + row * SIZE + channel, out.to(out_ptr.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """As `engine.kernels.pointwise.swiglu.swiglu`; `out` contiguous [T, I]."""
    assert gate_up.is_contiguous()
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], size) if out is None else out
    rows = gate_up.numel() // (2 * size)
    if rows == 0:
        return out
    config = launch_config("swiglu", f"size{size}", {"BLOCK": 1024, "num_warps": 4})
    grid = (rows, triton.cdiv(size, config["BLOCK"]))
    _swiglu_kernel[grid](gate_up, out, SIZE=size, **config)
    return out


def _aot(size: int, dtype: str) -> AotCase:
    return AotCase(
        name=f"swiglu {size} {dtype}",
        kernel=_swiglu_kernel,
        signature={
            "gate_up_ptr": f"*{dtype}",
            "out_ptr": f"*{dtype}",
        },
        constexprs={"SIZE": size, "BLOCK": 1024},
    )


AOT = [
    *(_aot(size, "bf16") for size in (1536, 14336, 28672)),
    *(_aot(14336, dtype) for dtype in ("fp16", "fp32")),
]
