"""The gate of SwiGLU (arXiv:2002.05202): silu(gate) * up, where silu(z) = z / (1 + exp(-z)).

Knows no weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.backend import uses_triton
from engine.kernels.cpu.backend import LANES, serves
from engine.kernels.pointwise import cpu as cpu_rows

UNSHARED = 32_767
"""The most elements that torch computes on one thread (its grain is one more)."""


def swiglu(gate_up: Tensor, *, deterministic: bool = False) -> Tensor:
    """[T, 2 * I], the gates before the ups, -> [T, I], a new tensor. deterministic: a row's bits
    depend on no other row."""
    if uses_triton(gate_up.device):
        from engine.kernels.pointwise import swiglu_triton

        return swiglu_triton.swiglu(gate_up)
    if serves(gate_up) and gate_up.shape[-1] % (2 * LANES) == 0:
        return cpu_rows.swiglu(gate_up)
    if not deterministic:
        return _reference(gate_up)
    # Torch gives the end of a thread's share other instructions than the rest, and shares are cut
    # anywhere in a row.
    rows = max(1, UNSHARED // gate_up.shape[-1])
    return torch.cat([_reference(few) for few in gate_up.split(rows)])


def _reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
