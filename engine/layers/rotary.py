"""Rotary position embedding (RoFormer, arXiv:2104.09864) and the scalings of its frequencies.

Channels i and i + head_dim / 2 form a pair, as in Hugging Face checkpoints.
"""

from __future__ import annotations

import math

import msgspec
import torch
from torch import Tensor

from engine.kernels.backend import uses_triton
from engine.kernels.pointwise.types import Rotation

SMALL_TABLE = 16_384
"""Positions: 6 MiB of bfloat16 for heads of 128 channels."""


class LinearScaling(msgspec.Struct, frozen=True):
    """Positions divided by `factor` (position interpolation, arXiv:2306.15595)."""

    factor: float


class Llama3Scaling(msgspec.Struct, frozen=True):
    """Low frequencies divided by `factor`, high ones kept, a smooth passage between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


RopeScaling = LinearScaling | Llama3Scaling


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians per position of each channel pair, float32 [head_dim / 2]."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequency = 1.0 / (theta**exponent)
    if scaling is None:
        return frequency
    slowed = frequency / scaling.factor
    if isinstance(scaling, LinearScaling):
        return slowed
    wavelength = 2 * math.pi / frequency
    turns = scaling.original_max_position_embeddings / wavelength
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1 - kept) * slowed + kept * frequency


class RotaryEmbedding:
    """Angles are float32 whatever the model's dtype is; cosines and sines are rounded to it."""

    def __init__(
        self,
        frequency: Tensor,
        dtype: torch.dtype,
        max_positions: int,
        *,
        deterministic: bool = False,
    ) -> None:
        """frequency: float32 [head_dim / 2] on the device of the positions, which are all below
        `max_positions`. Kernels look angles up in a table of all of them. So does who wants them
        the same in any batch, because torch computes the end of an array by other instructions;
        and whose table is small, because two look-ups take a fifth of the time."""
        self._frequency = frequency
        self._dtype = dtype
        self._table: Rotation | None = None
        small = max_positions <= SMALL_TABLE
        if deterministic or small or uses_triton(frequency.device):
            self._table = self._rotation(torch.arange(max_positions, device=frequency.device))

    def __call__(self, positions: Tensor) -> Rotation:
        """positions: int64 [T]"""
        if self._table is None:
            return self._rotation(positions)
        if uses_triton(positions.device):
            return self._table._replace(positions=positions)
        # Looked up here, once for all layers.
        return Rotation(self._table.cos[positions], self._table.sin[positions])

    def _rotation(self, positions: Tensor) -> Rotation:
        angle = positions[:, None, None].float() * self._frequency
        cos, sin = angle.cos().to(self._dtype), angle.sin().to(self._dtype)
        return Rotation(torch.cat((cos, cos), dim=-1), sin)
