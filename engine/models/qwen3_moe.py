"""Qwen 3 with a mixture of experts (arXiv:2505.09388): Qwen 3 whose layers, all or some, route."""

from __future__ import annotations

import msgspec

from engine.errors import ConfigError
from engine.models import qwen3
from engine.models.config import Experts, HFConfig, Traits, needed

EXPERTS_PER_TOKEN = 8
"""The default of a config.json without the field."""


def from_hf(hf: HFConfig) -> Traits:
    # transformers 5 writes the number of experts under Mixtral's name.
    num_experts = hf.num_experts or needed("num_experts", hf.num_local_experts)
    if hf.decoder_sparse_step < 1:
        raise ConfigError("config.json: decoder_sparse_step must be positive")
    routed = tuple(
        index not in hf.mlp_only_layers and (index + 1) % hf.decoder_sparse_step == 0
        for index in range(hf.num_hidden_layers)
    )
    experts = Experts(
        num_experts=num_experts,
        experts_per_token=hf.num_experts_per_tok or EXPERTS_PER_TOKEN,
        intermediate_size=needed("moe_intermediate_size", hf.moe_intermediate_size),
        normalise=hf.norm_topk_prob,
        layers=routed,
        names=("mlp", "gate_proj", "up_proj", "down_proj"),
    )
    return msgspec.structs.replace(qwen3.from_hf(hf), experts=experts)
