"""Rotary position embedding (RoFormer, arXiv:2104.09864).

Channels i and i + head_dim / 2 form a pair, as in Hugging Face checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.backend import uses_triton
from engine.kernels.pointwise.types import Rotation

SMALL_TABLE = 16_384
"""Positions: 6 MiB of bfloat16 for heads of 128 channels."""


class RotaryEmbedding:
    """Angles are float32 whatever the model's dtype is; cosines and sines are rounded to it."""

    def __init__(
        self,
        frequency: Tensor,
        dtype: torch.dtype,
        max_positions: int,
        *,
        attention_factor: float = 1.0,
        deterministic: bool = False,
    ) -> None:
        """frequency: float32 [head_dim / 2] on the device of the positions, which are all below
        `max_positions`; channels of frequency 0 are left as they are. attention_factor: multiplies
        the cosines and sines of all others. Kernels look angles up in a table of all of them. So
        does who wants them the same in any batch, because torch computes the end of an array by
        other instructions; and whose table is small, because two look-ups take a fifth of the
        time."""
        self._frequency = frequency
        self._attention_factor = torch.where(frequency > 0, attention_factor, 1.0)
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
        cos, sin = (
            (wave * self._attention_factor).to(self._dtype) for wave in (angle.cos(), angle.sin())
        )
        return Rotation(torch.cat((cos, cos), dim=-1), sin)
