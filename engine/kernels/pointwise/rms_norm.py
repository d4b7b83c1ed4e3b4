"""Root-mean-square normalisation (arXiv:1910.07467), alone and after a residual addition.

    rms_norm(x)_i = x_i / sqrt(mean(x^2) + eps) * weight_i        over the last axis, in float32

Knows no model. The residual is rounded to its dtype before it is normalised, on every device: it is
what the next block reads.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from engine.kernels.backend import uses_triton
from engine.kernels.cpu.backend import serves
from engine.kernels.pointwise import cpu as cpu_rows


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., size] -> [..., size], a new tensor; weight [size]."""
    if uses_triton(x.device):
        from engine.kernels.pointwise import rms_norm_triton

        return rms_norm_triton.rms_norm(x, weight, eps)
    if serves(x):
        return cpu_rows.add_rms_norm(None, x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds `delta` to `residual` in place, both [..., size], and returns the sum normalised."""
    if uses_triton(residual.device):
        from engine.kernels.pointwise import rms_norm_triton

        return rms_norm_triton.add_rms_norm(delta, residual, weight, eps)
    if serves(residual) and delta.is_contiguous():
        return cpu_rows.add_rms_norm(delta, residual, weight, eps)
    residual += delta
    return F.rms_norm(residual, weight.shape, weight, eps)
