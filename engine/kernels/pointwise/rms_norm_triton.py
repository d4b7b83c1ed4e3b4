"""RMSNorm and residual addition in one pass over the rows.

    r <- r + d (rounded to r's dtype);  y = r * rsqrt(mean(r^2) + eps) * w

Grid (rows): one program holds a whole row in registers. Bytes: 2 of a row alone (x read, y
written), 4 with the addition (d and r read, r and y written); the weight stays in the cache.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.aot import AotCase
from engine.kernels.tuning import launch_config


@triton.jit
def _norm_kernel(
    x_ptr, delta_ptr, weight_ptr, out_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """x, delta, out: contiguous [rows, SIZE]; with ADD, x is the residual and is written back."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    channel = tl.arange(0, BLOCK)
    inside = channel < SIZE
    x = tl.load(x_ptr + row + channel, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta_ptr + row + channel, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row + channel, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    out = (x * scale * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row + channel, out, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """As `engine.kernels.pointwise.rms_norm.rms_norm`; `out` like x, contiguous."""
    x = x.contiguous()
    out = torch.empty_like(x) if out is None else out
    _launch(x, x, weight, eps, out, add=False)
    return out


def add_rms_norm(
    delta: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """As `engine.kernels.pointwise.rms_norm.add_rms_norm`; `out` may be `delta` itself."""
    assert residual.is_contiguous() and delta.is_contiguous()
    assert delta.shape == residual.shape
    out = torch.empty_like(residual) if out is None else out
    _launch(residual, delta, weight, eps, out, add=True)
    return out


def _launch(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor, *, add: bool
) -> None:
    size = weight.shape[0]
    rows = x.numel() // size
    if rows == 0:
        return
    config = launch_config("rms_norm", f"size{size}", {"num_warps": _warps(size)})
    _norm_kernel[(rows,)](
        x, delta, weight, out, eps, SIZE=size, BLOCK=triton.next_power_of_2(size), ADD=add, **config
    )


def _warps(size: int) -> int:
    """About 16 elements a thread: two 16-byte loads of 2-byte numbers."""
    return min(16, max(1, triton.next_power_of_2(size) // 512))


def _aot(size: int, dtype: str, add: bool) -> AotCase:
    pointers = {f"{name}_ptr": f"*{dtype}" for name in ("x", "delta", "weight", "out")}
    constexprs = {"SIZE": size, "BLOCK": triton.next_power_of_2(size), "ADD": add}
    return AotCase(
        name=f"{'add_' if add else ''}rms_norm {size} {dtype}",
        kernel=_norm_kernel,
        signature={**pointers, "eps": "fp32"},
        constexprs=constexprs,
        num_warps=_warps(size),
    )


AOT = [
    *(_aot(size, "bf16", add) for size in (576, 1024, 4096, 8192) for add in (False, True)),
    *(_aot(4096, dtype, True) for dtype in ("fp16", "fp32")),
]
