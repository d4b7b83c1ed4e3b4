"""Root-mean-square normalisation (arXiv:1910.07467)."""

from __future__ import annotations

from torch import Tensor

from engine.kernels.pointwise.rms_norm import add_rms_norm, rms_norm
from engine.layers.weight_source import WeightSource


class RMSNorm:
    """Over the last axis, [..., size] -> [..., size]; computed in float32 inside."""

    def __init__(self, source: WeightSource, name: str, size: int, eps: float) -> None:
        self._weight = source.take(f"{name}.weight", (size,))
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self._weight, self._eps)

    def add(self, delta: Tensor, residual: Tensor) -> Tensor:
        """Adds `delta` to `residual` in place and returns the sum normalised."""
        return add_rms_norm(delta, residual, self._weight, self._eps)
