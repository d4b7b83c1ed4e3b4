"""silu(gate) * up against float64."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.pointwise import swiglu_triton
from engine.kernels.pointwise.swiglu import swiglu

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 1), (3, 100), (2, 1024), (2, 1030)])
def test_swiglu(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(size)
    gate_up = (torch.randn(rows, 2 * size, generator=generator) * 4).to(device, dtype)
    out = torch.full((rows, size), torch.nan, device=device, dtype=dtype)
    swiglu_triton.swiglu(gate_up, out)
    gate, up = gate_up.double().chunk(2, dim=-1)
    wanted = gate * torch.sigmoid(gate) * up
    assert (out.double() - wanted).norm() <= TOLERANCE[dtype] * wanted.norm()
    assert torch.equal(swiglu(gate_up), out)


def test_large_gates_neither_overflow_nor_vanish(device: torch.device) -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 0.0, 2.0, 2.0, 2.0]], device=device)
    assert swiglu(gate_up).tolist() == [[0.0, 2e4, 0.0]]
