"""Qwen 3 (arXiv:2505.09388): queries and keys normalised per head, no biases unless named."""

from __future__ import annotations

from engine.models.config import HFConfig, Traits
from engine.models.qwen2 import layer_windows

UNNAMED_HEAD_DIM = 128


def from_hf(hf: HFConfig) -> Traits:
    return Traits(
        windows=layer_windows(hf),
        qkv_bias=hf.attention_bias,
        output_bias=hf.attention_bias,
        qk_norm=True,
        head_dim=UNNAMED_HEAD_DIM,
    )
