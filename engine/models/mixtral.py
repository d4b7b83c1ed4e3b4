"""Mixtral (arXiv:2401.04088): Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from msgspec import UNSET

from engine.models.config import Experts, HFConfig, Traits, needed

EXPERTS_PER_TOKEN = 2
"""The default of a config.json without the field."""


def from_hf(hf: HFConfig) -> Traits:
    window = None if hf.sliding_window is UNSET else hf.sliding_window
    experts = Experts(
        num_experts=needed("num_local_experts", hf.num_local_experts),
        experts_per_token=hf.num_experts_per_tok or EXPERTS_PER_TOKEN,
        intermediate_size=hf.intermediate_size,
        normalise=True,
        layers=(True,) * hf.num_hidden_layers,
        names=("block_sparse_moe", "w1", "w3", "w2"),
    )
    return Traits(windows=(window,) * hf.num_hidden_layers, experts=experts)
