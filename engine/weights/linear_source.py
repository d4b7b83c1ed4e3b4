"""Tensors become the weights of layers: which linear layer is quantised, and how.

Implements `layers/weight_source.py` over any source of tensors. Knows no files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.kernels.attention.types import KVScales
from engine.kernels.linear.weights import DenseWeight, LinearWeight, quantise_fp8, quantise_int8
from engine.kernels.mixture.lora import deterministic, stack_adapters
from engine.layers.lora import AdapterBatch, LoraLinear
from engine.layers.parallel import WHOLE, Shard
from engine.weights.adapters import Adapter
from engine.weights.quantization import LayerShape, Tensors, quantization_method, read_kv_scales

Quantization = Literal["none", "int8", "fp8"]
"""The format that dense linear layers are converted to when they are loaded."""
REQUANTISE: dict[Quantization, Callable[[Tensor], LinearWeight]] = {
    "none": DenseWeight,
    "int8": quantise_int8,
    "fp8": quantise_fp8,
}


@dataclass(frozen=True, slots=True)
class LinearOptions:
    """The options that were asked for beside what is stored."""

    quantization: Quantization = "none"
    adapters: Sequence[Adapter] = ()
    deterministic: bool = False


class LinearSource:
    """A `WeightSource`. The tensors decide, layer by layer, whether one is stored quantised: what a
    configuration lists as not converted is simply dense."""

    def __init__(
        self,
        tensors: Tensors,
        asked: LinearOptions,
        *,
        device: torch.device,
        stored: dict[str, Any] | None = None,
    ) -> None:
        """stored: the checkpoint's quantization_config. Raises UnsupportedModel or ConfigError."""
        quantization, adapters = asked.quantization, asked.adapters
        if stored is not None and quantization != "none":
            method = stored.get("quant_method")
            raise ConfigError(
                f"quantization is {quantization}, but the checkpoint is quantised ({method}) "
                "already"
            )
        self._tensors = tensors
        self._method = quantization_method(stored)
        self._quantization = quantization
        self._adapters = adapters
        self._example = torch.empty(0, dtype=tensors.dtype, device=device)
        names = [adapter.name for adapter in adapters]
        self.adapters = AdapterBatch(names, device) if adapters else None
        """See `WeightSource.adapters`."""
        self.deterministic = asked.deterministic
        """See `WeightSource.deterministic`."""

    def take(self, name: str, shape: tuple[int, ...], shard: Shard = WHOLE) -> Tensor:
        """See `WeightSource.take`."""
        return self._tensors.take(name, shape, shard)

    def lora(
        self, parts: Sequence[tuple[str, int]], in_features: int, shard: Shard = WHOLE
    ) -> LoraLinear | None:
        """See `WeightSource.lora`."""
        found = [
            [
                adapter.take(name, out, in_features, shard, example=self._example)
                for name, out in parts
            ]
            for adapter in self._adapters
        ]
        if self.adapters is None or not any(pair for pairs in found for pair in pairs):
            return None
        share = shard.parts if shard.dim == 0 else 1
        stack = stack_adapters(found, [out // share for _, out in parts], self._example)
        if self.deterministic:
            stack = deterministic(stack)
        return LoraLinear(stack, self.adapters)

    def check_adapters(self) -> None:
        """UnsupportedModel when an adapter has tensors that no layer asked for."""
        for adapter in self._adapters:
            adapter.check_all_taken()

    def kv_scales(self, name: str, num_kv_heads: int, shard: Shard = WHOLE) -> KVScales | None:
        """See `WeightSource.kv_scales`."""
        return read_kv_scales(self._tensors, name, num_kv_heads, shard)

    def has(self, name: str) -> bool:
        """See `WeightSource.has`."""
        return self._tensors.dtype_of(name) is not None

    def dense(self, weight: Tensor) -> LinearWeight:
        """See `WeightSource.dense`."""
        return REQUANTISE[self._quantization](weight)

    def head(self, weight: Tensor) -> LinearWeight:
        """See `WeightSource.head`. In int8 it is as exact as other layers; float8 is too coarse."""
        return quantise_int8(weight) if self._quantization == "int8" else DenseWeight(weight)

    def linear(
        self, name: str, out_features: int, in_features: int, shard: Shard = WHOLE
    ) -> LinearWeight:
        """See `WeightSource.linear`."""
        if self._method is not None:
            layer = LayerShape(name, out_features, in_features, shard)
            weight = self._method(self._tensors, layer)
            if weight is not None:
                return weight
        shape = (out_features, in_features)
        return self.dense(self._tensors.take(f"{name}.weight", shape, shard))
