"""RMSNorm, alone and after an addition, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.pointwise import rms_norm_triton
from engine.kernels.pointwise.rms_norm import add_rms_norm, rms_norm

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
EPS = 1e-5


def reference(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


def error(out: Tensor, wanted: Tensor) -> float:
    return float((out.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 64), (5, 80), (2, 577), (4, 1024)])
def test_norm_and_addition(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(rows * size)
    x, delta = (torch.randn(2, rows, size, generator=generator) * 3).to(device, dtype)
    weight = torch.randn(size, generator=generator).to(device, dtype)
    out = torch.full_like(x, torch.nan)
    assert rms_norm_triton.rms_norm(x, weight, EPS, out) is out
    assert error(out, reference(x, weight)) < TOLERANCE[dtype]
    residual = x.clone()
    out.fill_(torch.nan)
    rms_norm_triton.add_rms_norm(delta, residual, weight, EPS, out)
    assert torch.equal(residual, x + delta), "the residual is rounded as torch rounds it"
    assert error(out, reference(residual, weight)) < TOLERANCE[dtype]


def test_a_row_is_the_same_in_any_batch(device: torch.device) -> None:
    x, weight = torch.randn(6, 96, device=device), torch.randn(96, device=device)
    together = rms_norm(x, weight, EPS)
    assert all(torch.equal(rms_norm(x[i : i + 1], weight, EPS)[0], together[i]) for i in range(6))


def test_nothing_to_do_and_more_axes(device: torch.device) -> None:
    weight = torch.randn(32, device=device)
    assert rms_norm(torch.empty(0, 32, device=device), weight, EPS).shape == (0, 32)
    x = torch.randn(2, 3, 32, device=device)
    assert error(rms_norm(x, weight, EPS), reference(x, weight)) < 1e-5


def test_the_norm_may_lie_where_the_delta_was(device: torch.device) -> None:
    x, delta, weight = (torch.randn(4, 48, device=device) for _ in range(3))
    residual, weight = x.clone(), weight[0]
    wanted = add_rms_norm(delta.clone(), residual.clone(), weight, EPS)
    assert torch.equal(rms_norm_triton.add_rms_norm(delta, residual, weight, EPS, delta), wanted)
    assert torch.equal(delta, wanted)
