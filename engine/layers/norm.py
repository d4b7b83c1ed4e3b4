"""Root-mean-square normalisation (arXiv:1910.07467). Above: decoder, attention. Below: torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from engine.layers.weight_source import WeightSource


class RMSNorm:
    """Over the last axis, [..., size] -> [..., size]; computed in float32 inside."""

    def __init__(self, source: WeightSource, name: str, size: int, eps: float) -> None:
        self._weight = source.take(f"{name}.weight", (size,))
        self._size = (size,)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self._size, self._weight, self._eps)
