"""Adapters beside linear layers: several over one base, mixed in a batch.

Knows adapters by name, no files and no requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.mixture.lora import add_lora
from engine.kernels.mixture.types import NOBODY, LoraRows, LoraStack


class AdapterBatch:
    """The adapter of each token of the step; shared by all layers of a model."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._slot_of = {name: slot for slot, name in enumerate(names)} | {"": NOBODY}
        self.rows = LoraRows(device, len(names))

    def assign(self, adapters: Sequence[tuple[str, int]]) -> None:
        """adapters: (name, or "" for none; tokens that have it), in the order of the tokens."""
        self.rows.assign([(self._slot_of[name], count) for name, count in adapters])

    def assign_any(self, num_tokens: int) -> None:
        """Make what is launched next fit any adapters of so many tokens, 0 for none: for CUDA
        graphs, which take launches as they are."""
        self.rows.assign([(0, num_tokens)] if num_tokens else [])


class LoraLinear:
    """The part that all adapters add to one linear layer."""

    def __init__(self, stack: LoraStack, batch: AdapterBatch) -> None:
        self._stack = stack
        self._rows = batch.rows

    def add(self, y: Tensor, x: Tensor) -> None:
        """To y [T, out] for the inputs x [T, in], in place."""
        add_lora(y, x, self._stack, self._rows)
