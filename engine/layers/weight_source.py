"""Defines where layers get their weights from while they are built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from engine.kernels.attention.types import KVScales
from engine.kernels.linear.weights import LinearWeight
from engine.layers.lora import AdapterBatch, LoraLinear
from engine.layers.parallel import WHOLE, Shard


class WeightSource(Protocol):
    @property
    def deterministic(self) -> bool:
        """Whether layers must compute a token to the same bits in any batch."""

    @property
    def adapters(self) -> AdapterBatch | None:
        """Shared by all layers that `lora` gave adapters to; None without any."""

    def lora(
        self, parts: Sequence[tuple[str, int]], in_features: int, shard: Shard = WHOLE
    ) -> LoraLinear | None:
        """Return what the adapters add to linear layers of one input, (name, out_features) side by
        side; None where none does. Cut like `linear`.
        """

    def take(self, name: str, shape: tuple[int, ...], shard: Shard = WHOLE) -> Tensor:
        """The part `shard` of the tensor `name`, which must have `shape` as a whole, on the
        source's device and in its dtype.

        Raises ConfigError that names the tensor when it is absent or has another shape.
        """

    def kv_scales(self, name: str, num_kv_heads: int, shard: Shard = WHOLE) -> KVScales | None:
        """Return what the attention `name` divides keys and values by where its cache is float8, of
        this rank's heads; None where nothing is stored. num_kv_heads: over all ranks.
        """

    def has(self, name: str) -> bool:
        """Whether a tensor of this name is stored."""

    def dense(self, weight: Tensor) -> LinearWeight:
        """Return what a dense weight [out, in], taken as part of something larger, is served as."""

    def head(self, weight: Tensor) -> LinearWeight:
        """Return what the product with the vocabulary, [vocab, hidden], is served as."""

    def linear(
        self, name: str, out_features: int, in_features: int, shard: Shard = WHOLE
    ) -> LinearWeight:
        """The weight of the linear layer `name`, in the form it is stored in, or in the one it is
        to be served in; dimension 0 cuts outputs, 1 inputs. Otherwise as `take`.
        """
