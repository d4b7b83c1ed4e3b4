"""The pre-norm decoder that Llama, Mistral, Qwen2, Qwen3 and their mixtures of experts share.

What it computes of a step's tokens becomes logits (`logits`), or is looked at itself (`hidden`)
where a prompt is embedded.

Knows no sequences: a step's tokens lie flat behind each other, attention plans tell them apart.
Shapes: T tokens of the step, S rows whose next token is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.attention.cpu import CpuAttentionPlan
from engine.kernels.attention.types import AttentionPlan, KVLayer
from engine.kernels.cpu.layer_program import MAX_TOKENS, LayerPrograms, Varying, do_nothing
from engine.kernels.pointwise.types import Rotation
from engine.layers.attention import Attention
from engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from engine.layers.feed_forward import ExpertNames, GatedMLP, MixtureOfExperts
from engine.layers.norm import RMSNorm
from engine.layers.parallel import SINGLE_RANK, ParallelGroup, own_shard
from engine.layers.rotary import RotaryEmbedding, attention_factor, inverse_frequencies
from engine.layers.weight_source import WeightSource
from engine.models.config import ModelConfig


class DecoderLayer:
    def __init__(
        self, source: WeightSource, index: int, config: ModelConfig, group: ParallelGroup
    ) -> None:
        name = f"model.layers.{index}"
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self._attention_norm = RMSNorm(source, f"{name}.input_layernorm", hidden, eps)
        self._attention = Attention(
            source,
            f"{name}.self_attn",
            hidden=hidden,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            qk_norm_eps=eps if config.qk_norm else None,
            group=group,
        )
        self.kv_scales = self._attention.kv_scales
        self._mlp_norm = RMSNorm(source, f"{name}.post_attention_layernorm", hidden, eps)
        self._mlp = _feed_forward(source, index, config, group)

    def __call__(
        self,
        delta: Tensor | None,
        residual: Tensor,
        rotation: Rotation,
        plan: AttentionPlan,
        cache: KVLayer,
    ) -> Tensor:
        """residual [T, hidden] is the residual stream; `delta`, what the layer before has to add to
        it (None for the first), is added in place. Returns what this layer has to add: addition and
        the norm that follows are one operation."""
        if delta is None:
            normed = self._attention_norm(residual)
        else:
            normed = self._attention_norm.add(delta, residual)
        delta = self._attention(normed, rotation, plan, cache)
        return self._mlp(self._mlp_norm.add(delta, residual))


def _feed_forward(
    source: WeightSource, index: int, config: ModelConfig, group: ParallelGroup
) -> GatedMLP | MixtureOfExperts:
    name, experts = f"model.layers.{index}", config.experts
    if experts is None or not experts.layers[index]:
        sizes = (config.hidden_size, config.intermediate_size)
        return GatedMLP(source, f"{name}.mlp", *sizes, bias=config.mlp_bias, group=group)
    return MixtureOfExperts(
        source,
        name,
        ExpertNames(*experts.names),
        hidden=config.hidden_size,
        intermediate=experts.intermediate_size,
        num_experts=experts.num_experts,
        experts_per_token=experts.experts_per_token,
        normalise=experts.normalise,
        group=group,
    )


def _bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes that a dense layer allocates on its way for one token."""
    heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    return (4 * config.hidden_size + heads + 3 * config.intermediate_size) * dtype.itemsize


class States(NamedTuple):
    """A step's tokens behind the last layer."""

    delta: Tensor
    """[T, hidden], what that layer has to add"""
    residual: Tensor
    """[T, hidden]"""


class Decoder:
    """Token ids to logits. Built whole: weights are taken by their Hugging Face names."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: ParallelGroup = SINGLE_RANK,
        max_model_len: int | None = None,
    ) -> None:
        """max_model_len: the longest text; None: the window of `config`."""
        self.config = config
        self.group = group
        self.dtype = dtype
        self.device = device
        self.adapters = source.adapters
        """The adapters; the runner sets each token's adapter before a step. None: no adapters."""
        self._embedding = VocabParallelEmbedding(
            source, "model.embed_tokens", config.vocab_size, config.hidden_size, group
        )
        frequency = inverse_frequencies(
            config.rotary_dim,
            config.rope_theta,
            config.rope_scaling,
            max_model_len=min(max_model_len or config.max_model_len, config.max_model_len),
        )
        not_rotated = torch.zeros((config.head_dim - config.rotary_dim) // 2)
        self._rotary = RotaryEmbedding(
            torch.cat((frequency, not_rotated)).to(device),
            dtype,
            config.max_model_len,
            attention_factor=attention_factor(config.rope_scaling),
            deterministic=source.deterministic,
        )
        self._layers = [
            DecoderLayer(source, index, config, group) for index in range(config.num_layers)
        ]
        self.kv_scales = [layer.kv_scales for layer in self._layers]
        """By layer, for a float8 cache; see `Attention`."""
        self._norm = RMSNorm(source, "model.norm", config.hidden_size, config.rms_norm_eps)
        self._lm_head: ParallelLMHead | None = None
        if config.generates:
            self._lm_head = ParallelLMHead(
                source.head(self._lm_head_weight(source)), group, deterministic=source.deterministic
            )
        self._programs = LayerPrograms(_bytes_per_token(config, dtype))

    def _lm_head_weight(self, source: WeightSource) -> Tensor:
        if self.config.tie_word_embeddings:
            return self._embedding.weight
        shape = (self.config.vocab_size, self.config.hidden_size)
        return source.take("lm_head.weight", shape, own_shard(self.group))

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        plans: Mapping[int | None, AttentionPlan],
        cache: Sequence[KVLayer],
        sampling_rows: Tensor,
    ) -> Tensor:
        """Compute the step; the logits [S, vocab] of `sampling_rows`, int64 [S] into the T tokens.
        Otherwise as `states`."""
        return self.logits(self.states(token_ids, positions, plans, cache), sampling_rows)

    def states(
        self,
        token_ids: Tensor,
        positions: Tensor,
        plans: Mapping[int | None, AttentionPlan],
        cache: Sequence[KVLayer],
    ) -> States:
        """Compute the step. token_ids, positions: int64 [T]. plans: by window. cache: by layer."""
        residual = self._embedding(token_ids)
        rotation = self._rotary(positions)
        return States(*self._through_layers(residual, rotation, plans, cache))

    def hidden(self, states: States, rows: Tensor | None) -> Tensor:
        """[R, hidden] behind the final norm, in the model's dtype. rows: int [R] into the T
        tokens; None: all of them."""
        if rows is None:
            return self._norm.add(*states)
        return self._norm.add(*(x.index_select(0, rows) for x in states))

    def logits(self, states: States, rows: Tensor | None) -> Tensor:
        """[R, vocab], alike, of a model that generates."""
        assert self._lm_head is not None, "logits of a model without a head"
        return self._lm_head(self.hidden(states, rows))

    def most_likely(self, states: States, rows: Tensor | None) -> Tensor:
        """int64 [R], the tokens with the largest logits; see `ParallelLMHead`."""
        assert self._lm_head is not None, "a token of a model without a head"
        return self._lm_head.most_likely(self.hidden(states, rows))

    def _through_layers(
        self,
        residual: Tensor,
        rotation: Rotation,
        plans: Mapping[int | None, AttentionPlan],
        cache: Sequence[KVLayer],
    ) -> tuple[Tensor, Tensor]:
        """Return what the last layer has to add, and the residual stream."""

        def layers(residual: Tensor, before_layer: Callable[[], None]) -> tuple[Tensor, Tensor]:
            delta: Tensor | None = None
            for layer, window, kv in zip(self._layers, self.config.windows, cache, strict=True):
                before_layer()
                delta = layer(delta, residual, rotation, plans[window], kv)
            assert delta is not None, "a decoder has layers"
            return delta, residual

        varying: Varying = {}
        for plan in plans.values():
            if not isinstance(plan, CpuAttentionPlan):
                return layers(residual, do_nothing)
            varying |= plan.varying(rotation.cos, rotation.sin)
        # An adapter's part in a layer differs from step to step, as a sum over ranks does.
        if len(residual) > MAX_TOKENS or self.adapters is not None or self.group.size > 1:
            return layers(residual, do_nothing)
        return self._programs.run(residual, varying, cache[0].k.data_ptr(), layers)
