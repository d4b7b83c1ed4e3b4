"""The post-norm encoder of BERT's family: every token of a text looks at all of them, so a text is
computed whole, in one step, and nothing of it is kept.

Knows no sequences but how many tokens of a step each has: they lie flat behind each other. Shapes:
T tokens of the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.errors import UnsupportedModel
from engine.kernels.attention.types import KVScales
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.layers.parallel import SINGLE_RANK
from engine.layers.weight_source import WeightSource
from engine.models.config import EncoderTraits, ModelConfig
from engine.models.decoder import States

NOT_READ = ("pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids")
"""Stored by some checkpoints: of BERT's own pooling of its first token, which no embedding uses."""


class LayerNorm:
    """Over the last axis (arXiv:1607.06450)."""

    def __init__(self, source: WeightSource, name: str, size: int, eps: float) -> None:
        self._weight = source.take(f"{name}.weight", (size,))
        self._bias = source.take(f"{name}.bias", (size,))
        self._shape, self._eps = (size,), eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._shape, self._weight, self._bias, self._eps)


class EncoderLayer:
    def __init__(
        self, source: WeightSource, index: int, config: ModelConfig, traits: EncoderTraits
    ) -> None:
        name, hidden = f"encoder.layer.{index}", config.hidden_size
        inner, eps = config.intermediate_size, traits.layer_norm_eps
        own = f"{name}.attention.self"
        parts = [(f"{own}.{each}", hidden) for each in ("query", "key", "value")]
        self._num_heads = config.num_heads
        self._qkv = ColumnParallelLinear(source, parts, hidden, bias=True, group=SINGLE_RANK)
        self._output = _down(source, f"{name}.attention.output.dense", hidden, hidden)
        self._attention_norm = LayerNorm(source, f"{name}.attention.output.LayerNorm", hidden, eps)
        self._up = ColumnParallelLinear(
            source, [(f"{name}.intermediate.dense", inner)], hidden, bias=True, group=SINGLE_RANK
        )
        self._down = _down(source, f"{name}.output.dense", inner, hidden)
        self._norm = LayerNorm(source, f"{name}.output.LayerNorm", hidden, eps)

    def __call__(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        x = self._attention_norm(x + self._output(self._attend(self._qkv(x), lengths)))
        return self._norm(x + self._down(F.gelu(self._up(x))))

    def _attend(self, qkv: Tensor, lengths: Sequence[int]) -> Tensor:
        """[T, 3 * hidden] -> [T, hidden]; each text by itself, so that none is padded."""
        heads = qkv.view(len(qkv), 3, self._num_heads, -1).permute(1, 2, 0, 3)
        found = [
            F.scaled_dot_product_attention(*(each[None] for each in part))[0]
            for part in heads.split(list(lengths), dim=2)
        ]
        return torch.cat(found, dim=1).transpose(0, 1).flatten(1)


def _down(source: WeightSource, name: str, inputs: int, outputs: int) -> RowParallelLinear:
    return RowParallelLinear(source, name, inputs, outputs, bias=True, group=SINGLE_RANK)


class Encoder:
    """Token ids to hidden states. Built whole: weights are taken by their Hugging Face names."""

    group = SINGLE_RANK
    kv_scales: Sequence[KVScales | None] = ()

    def __init__(
        self, config: ModelConfig, source: WeightSource, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        traits = config.encoder
        assert traits is not None, "a decoder"
        if source.adapters is not None:
            raise UnsupportedModel("adapters are not supported over an encoder")
        self.config = config
        self.dtype = dtype
        self.device = device
        hidden = config.hidden_size

        def table(name: str, rows: int) -> Tensor:
            return source.take(f"embeddings.{name}_embeddings.weight", (rows, hidden))

        self._words = table("word", config.vocab_size)
        # A text is one segment, the first.
        self._positions = (
            table("position", config.max_model_len) + table("token_type", traits.type_vocab_size)[0]
        )
        self._norm = LayerNorm(source, "embeddings.LayerNorm", hidden, traits.layer_norm_eps)
        self._layers = [
            EncoderLayer(source, index, config, traits) for index in range(traits.num_layers)
        ]

    def encode(self, token_ids: Tensor, positions: Tensor, lengths: Sequence[int]) -> States:
        """Compute the step. token_ids, positions: int64 [T]. lengths: of the texts."""
        x = self._norm(F.embedding(token_ids, self._words) + self._positions[positions])
        for layer in self._layers:
            x = layer(x, lengths)
        return States(x, x)

    def hidden(self, states: States, rows: Tensor | None) -> Tensor:
        """[R, hidden], as `Decoder.hidden`."""
        return states.residual if rows is None else states.residual.index_select(0, rows)
