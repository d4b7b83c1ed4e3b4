"""Qwen 2 and 2.5 (arXiv:2407.10671): biases on queries, keys, values; windows on upper layers."""

from __future__ import annotations

from msgspec import UNSET

from engine.errors import ConfigError, UnsupportedModel
from engine.models.config import HFConfig, Traits

UNNAMED_WINDOW = 4096
"""The window if `use_sliding_window` is set without a `sliding_window`."""


def from_hf(hf: HFConfig) -> Traits:
    return Traits(windows=layer_windows(hf), qkv_bias=True)


def layer_windows(hf: HFConfig) -> tuple[int | None, ...]:
    """A layer's window: `layer_types` names it, or layers from `max_window_layers` on have one."""
    if not hf.use_sliding_window:
        return (None,) * hf.num_hidden_layers
    window = UNNAMED_WINDOW if hf.sliding_window is UNSET else hf.sliding_window
    if hf.layer_types is None:
        full = min(hf.max_window_layers, hf.num_hidden_layers)
        return (None,) * full + (window,) * (hf.num_hidden_layers - full)
    kinds = {"full_attention": None, "sliding_attention": window}
    for kind in hf.layer_types:
        if kind not in kinds:
            raise UnsupportedModel(f"config.json: layer_types: {kind!r} is not supported")
    if len(hf.layer_types) != hf.num_hidden_layers:
        raise ConfigError(
            f"config.json: layer_types names {len(hf.layer_types)} layers, "
            f"num_hidden_layers is {hf.num_hidden_layers}"
        )
    return tuple(kinds[kind] for kind in hf.layer_types)
