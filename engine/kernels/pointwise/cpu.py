"""Calls of the processor's row-wise kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.cpu.backend import (
    DTYPES,
    LANES,
    empty,
    float_bits,
    half,
    kernel,
    start,
    uses_cpu_kernels,
)

ROWS_A_THREAD = 32
"""A team is not worth calling for fewer."""
EXACT_PLACES = 1 << 24
"""Places that a float32 tells apart."""


def add_rms_norm(delta: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `rms_norm.add_rms_norm`; without `delta` the residual stays as it is."""
    size = residual.shape[-1]
    rows = residual.numel() // size
    out = empty(residual.shape, residual.dtype)
    start(
        kernel("rows", "add_rms_norm"),
        (
            0,
            rows,
            size,
            0 if delta is None else delta.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            float_bits(eps),
            half(residual.dtype),
        ),
        _threads(rows),
    )
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """See `swiglu.swiglu`."""
    rows, width = gate_up.shape
    out = empty((rows, width // 2), gate_up.dtype)
    start(
        kernel("rows", "swiglu"),
        (0, rows, width // 2, gate_up.data_ptr(), 0, 0, out.data_ptr(), 0, half(gate_up.dtype)),
        _threads(rows),
    )
    return out


def argmax(logits: Tensor) -> Tensor | None:
    """The first largest of each row of logits [S, vocab], int64 [S]; -1 for a row that holds
    anything but finite numbers. None where no kernel takes them."""
    rows, vocab = logits.shape
    device = logits.device
    served = logits.dtype in DTYPES and logits.is_contiguous() and LANES <= vocab <= EXACT_PLACES
    if not served or not uses_cpu_kernels(device):
        return None
    out = torch.empty(rows, dtype=torch.int64)
    start(
        kernel("drawing", "argmax"),
        (0, rows, vocab, logits.data_ptr(), out.data_ptr(), half(logits.dtype)),
        min(torch.get_num_threads(), rows),
    )
    return out


def _threads(rows: int) -> int:
    return min(torch.get_num_threads(), -(-rows // ROWS_A_THREAD))
