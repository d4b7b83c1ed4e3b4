"""Calls of the processor's kernels for what a draw reads all of a row for.

Each of a row's results depends on that row alone.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.cpu.backend import LANES, kernel, start, uses_cpu_kernels

BLOCK = 512
"""As in `cpu/drawing.py`, which only who has numba can import."""
WORD = 32


def forbids(logits: Tensor) -> bool:
    return _serves(logits) and logits.shape[1] % WORD == 0


def draws(logits: Tensor) -> bool:
    return _serves(logits) and logits.shape[1] % LANES == 0


def _serves(logits: Tensor) -> bool:
    is_plain = logits.dtype == torch.float32 and logits.is_contiguous()
    return is_plain and uses_cpu_kernels(logits.device)


def forbid(logits: Tensor, masks: NDArray[np.int32]) -> None:
    """logits: float32 [S, vocab], -inf afterwards where the bit in masks [S, vocab / 32] is
    clear."""
    rows, vocab = logits.shape
    assert masks.flags.c_contiguous and masks.shape == (rows, vocab // WORD)
    start(
        kernel("drawing", "forbid"),
        (0, rows, vocab, logits.data_ptr(), masks.ctypes.data),
        _threads(rows),
    )


@np.errstate(divide="ignore", invalid="ignore")  # of rows that hold other than numbers
def draw(
    logits: Tensor,
    rows: NDArray[np.int64],
    best: NDArray[np.float32],
    temperature: NDArray[np.float32],
    min_p: NDArray[np.float32],
    uniforms: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Tokens int64 [R] of rows [R] of logits [S, vocab], drawn by inverting their cumulative
    distributions at `uniforms`; `vocab` for a row whose mass is not a finite number. best: the
    rows' maxima.

    Block by block first; then only the block that the draw falls into is looked at by token.
    """
    vocab = logits.shape[1]
    floor = np.log(min_p)
    sums = np.empty((len(rows), -(-vocab // BLOCK)), np.float32)
    arrays = [np.ascontiguousarray(each) for each in (best, temperature, floor, rows)]
    start(
        kernel("drawing", "masses"),
        (
            0,
            len(rows),
            vocab,
            logits.data_ptr(),
            *(each.ctypes.data for each in arrays),
            sums.ctypes.data,
        ),
        _threads(len(rows)),
    )
    mass = sums.cumsum(axis=1, dtype=np.float64)
    whole = mass[:, -1]
    sound = np.isfinite(whole) & (whole > 0)
    target = np.minimum(uniforms * whole, np.nextafter(whole, 0))
    block = np.minimum((mass <= target[:, None]).sum(axis=1), sums.shape[1] - 1)
    before = np.where(block > 0, np.take_along_axis(mass, block[:, None] - 1, axis=1)[:, 0], 0.0)
    tokens = block[:, None] * BLOCK + np.arange(BLOCK)
    is_there = tokens < vocab
    inside = np.minimum(tokens, vocab - 1)
    z = (logits.numpy()[rows[:, None], inside] - best[:, None]) / temperature[:, None]
    weight = np.where(is_there & (z >= floor[:, None]), np.exp(z), np.float32(0))
    reached = before[:, None] + weight.cumsum(axis=1, dtype=np.float64) > target[:, None]
    # The kernel's sum may be larger than this one by a rounding: then it is the last that counts.
    last = BLOCK - 1 - (weight[:, ::-1] > 0).argmax(axis=1)
    place = np.where(reached.any(axis=1), reached.argmax(axis=1), last)
    return np.where(sound, block * BLOCK + place, vocab)


def _threads(rows: int) -> int:
    return min(torch.get_num_threads(), rows)
