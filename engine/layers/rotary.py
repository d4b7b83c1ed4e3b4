"""Rotary position embedding (RoFormer, arXiv:2104.09864), and how it is stretched over longer texts
than it was trained on.

Channels i and i + head_dim / 2 form a pair, as in Hugging Face checkpoints.

The formulas of stretching are those of `transformers`. Two of them look at the length of the text:
longrope picks one of two lists of factors, dynamic NTK picks a base. Keys are cached rotated and
shared by texts of any length, so one engine picks once, for its own `max_model_len`, whatever a
request's length is; `transformers` picks anew for every forward pass. Both agree on a text of that
length, and on every text of an engine that is limited to the original length.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from engine.kernels.backend import uses_triton
from engine.kernels.pointwise.types import Rotation

SMALL_TABLE = 16_384
"""Positions: 6 MiB of bfloat16 for heads of 128 channels."""

Positive = Annotated[float, Meta(gt=0)]
Stretch = Annotated[float, Meta(ge=1)]
Length = Annotated[int, Meta(ge=2)]


class LinearScaling(msgspec.Struct, frozen=True):
    """Positions divided by `factor` (position interpolation, arXiv:2306.15595)."""

    factor: Positive


class Llama3Scaling(msgspec.Struct, frozen=True):
    """Low frequencies divided by `factor`, high ones kept, a smooth passage between (Llama 3.1)."""

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Length


class DynamicScaling(msgspec.Struct, frozen=True):
    """A larger base for longer texts (dynamic NTK): up to the original length, nothing changes."""

    factor: Stretch
    original_max_position_embeddings: Length


class YarnScaling(msgspec.Struct, frozen=True):
    """Channels that turn often in the original length kept, slow ones divided by `factor`, a linear
    ramp between, and sharper attention (YaRN, arXiv:2309.00071)."""

    factor: Stretch
    original_max_position_embeddings: Length
    attention_factor: Positive | None = None
    mscale: Annotated[float, Meta(ge=0)] | None = None
    mscale_all_dim: Annotated[float, Meta(ge=0)] | None = None
    beta_fast: Positive = 32.0
    """Turns in the original length from which a channel is kept."""
    beta_slow: Positive = 1.0
    """Turns up to which it is divided by all of `factor`."""
    truncate: bool = True
    """The ramp begins and ends at whole channels."""


class LongRopeScaling(msgspec.Struct, frozen=True):
    """A divisor for each channel, from one of two lists (LongRoPE, arXiv:2402.13753; Phi-3)."""

    short_factor: tuple[Positive, ...]
    """Up to the original length."""
    long_factor: tuple[Positive, ...]
    factor: Stretch
    original_max_position_embeddings: Length
    attention_factor: Positive | None = None


RopeScaling = LinearScaling | Llama3Scaling | DynamicScaling | YarnScaling | LongRopeScaling


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, *, max_model_len: int | None = None
) -> Tensor:
    """Radians per position of each channel pair, float32 [head_dim / 2]. max_model_len: the longest
    text of the engine; None: no longer than the original length."""
    if isinstance(scaling, DynamicScaling):
        theta *= _base_stretch(scaling, head_dim, max_model_len)
    powers = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    frequency = 1.0 / powers
    if isinstance(scaling, LinearScaling):
        return frequency / scaling.factor
    if isinstance(scaling, Llama3Scaling):
        wavelength = 2 * math.pi / frequency
        turns = scaling.original_max_position_embeddings / wavelength
        span = scaling.high_freq_factor - scaling.low_freq_factor
        kept = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
        return (1 - kept) * (frequency / scaling.factor) + kept * frequency
    if isinstance(scaling, YarnScaling):
        divided = _yarn_ramp(scaling, head_dim, theta)
        return divided * (1.0 / (scaling.factor * powers)) + (1 - divided) * frequency
    if isinstance(scaling, LongRopeScaling):
        is_long = (max_model_len or 0) > scaling.original_max_position_embeddings
        factors = scaling.long_factor if is_long else scaling.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * powers)
    return frequency


def attention_factor(scaling: RopeScaling | None) -> float:
    """The factor of all cosines and sines; its square is that of every attention score."""
    if not isinstance(scaling, YarnScaling | LongRopeScaling):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    stretch = math.log(scaling.factor)
    if isinstance(scaling, LongRopeScaling):
        return math.sqrt(1 + stretch / math.log(scaling.original_max_position_embeddings))
    if scaling.mscale and scaling.mscale_all_dim:
        return (0.1 * scaling.mscale * stretch + 1) / (0.1 * scaling.mscale_all_dim * stretch + 1)
    return 0.1 * stretch + 1


def _base_stretch(scaling: DynamicScaling, head_dim: int, max_model_len: int | None) -> float:
    original = scaling.original_max_position_embeddings
    length = max(max_model_len or original, original)
    stretch = scaling.factor * length / original - (scaling.factor - 1)
    return float(stretch ** (head_dim / (head_dim - 2)))


def _yarn_ramp(scaling: YarnScaling, head_dim: int, theta: float) -> Tensor:
    """float32 [head_dim / 2]: 0 where a channel is kept, 1 where it is divided by all of factor."""

    def channel(turns: float) -> float:
        wavelength = scaling.original_max_position_embeddings / turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    first, last = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # else 0 / 0
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)
    return ramp.clamp(0.0, 1.0)


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
