"""Phi-3, 3.5 and 4 (arXiv:2404.14219): Llama with one window for all layers, whose projections are
stored fused, and of whose channels some may not be rotated."""

from __future__ import annotations

from msgspec import UNSET

from engine.models.config import HFConfig, Traits


def from_hf(hf: HFConfig) -> Traits:
    window = None if hf.sliding_window is UNSET else hf.sliding_window
    return Traits(
        windows=(window,) * hf.num_hidden_layers, fused_projections=True, rotates_part=True
    )
