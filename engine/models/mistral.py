"""Mistral (arXiv:2310.06825): Llama with one sliding window for all layers."""

from __future__ import annotations

from msgspec import UNSET

from engine.models.config import HFConfig, Traits

UNNAMED_WINDOW = 4096
"""The window of a config.json without the field; null, as from version 0.2 on, means no window."""


def from_hf(hf: HFConfig) -> Traits:
    window = UNNAMED_WINDOW if hf.sliding_window is UNSET else hf.sliding_window
    return Traits(windows=(window,) * hf.num_hidden_layers)
