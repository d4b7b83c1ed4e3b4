"""Llama 2 and 3 (arXiv:2307.09288, arXiv:2407.21783) and what shares their form."""

from __future__ import annotations

from engine.models.config import HFConfig, Traits


def from_hf(hf: HFConfig) -> Traits:
    return Traits(
        windows=(None,) * hf.num_hidden_layers,
        qkv_bias=hf.attention_bias,
        output_bias=hf.attention_bias,
        mlp_bias=hf.mlp_bias,
    )
