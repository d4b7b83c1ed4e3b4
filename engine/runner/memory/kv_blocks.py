"""Copies whole blocks out of the KV cache and into it, all layers of a block side by side.

A layer's part of a block is small (6 KiB of a model of 135 M parameters); tiers move 30 times as
much at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.kernels.attention.types import KVLayer


class KVBlockCopier:
    """The bytes of a block are those of its keys and its values, layer by layer. All copies are
    queued on the stream of the steps, so one that was begun first is done first."""

    def __init__(self, layers: Sequence[KVLayer]) -> None:
        parts = [part for layer in layers for part in (layer.k, layer.v)]
        self._parts = [part.view(torch.uint8).view(part.shape[0], -1) for part in parts]
        self._device = parts[0].device
        self._ends = np.cumsum([part.shape[1] for part in self._parts]).tolist()
        self._starts = [0, *self._ends[:-1]]

    @property
    def block_bytes(self) -> int:
        return int(self._ends[-1])

    @property
    def num_blocks(self) -> int:
        return self._parts[0].shape[0]

    def host_rows(self, num_blocks: int) -> NDArray[np.uint8]:
        """Return host memory that the device copies from and to by itself, [num_blocks,
        block_bytes]. Raises RuntimeError, MemoryError."""
        size, pins = (num_blocks, self.block_bytes), self._device.type != "cpu"
        rows: NDArray[np.uint8] = torch.empty(size, dtype=torch.uint8, pin_memory=pins).numpy()
        return rows

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
        if self._device.type != "cpu":
            torch.cuda.synchronize(self._device)

    @torch.inference_mode()
    def gather(self, blocks: Sequence[int], rows: NDArray[np.uint8]) -> Callable[[], None]:
        """Begin to fill `rows` [blocks, block_bytes]; the result returns when they are filled."""
        target = torch.from_numpy(rows)
        if self._device.type == "cpu":
            self._gather(blocks, target)
            return _return_at_once
        # Behind the steps that were launched, and before those that may write to the blocks.
        gathered = torch.empty(rows.shape, dtype=torch.uint8, device=self._device)
        self._gather(blocks, gathered)
        pinned, is_pinned = target, target.is_pinned()
        if not is_pinned:
            pinned = torch.empty(target.shape, dtype=torch.uint8, pin_memory=True)
        pinned.copy_(gathered, non_blocking=True)
        event = torch.cuda.Event()
        event.record()

        def wait() -> None:
            event.synchronize()
            if not is_pinned:
                rows[:] = pinned.numpy()

        return wait

    @torch.inference_mode()
    def scatter(self, blocks: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """Fill blocks from `rows` [blocks, block_bytes], which are the caller's again at the
        return. Rows of `host_rows` are read, as they are filled, in the order of the device."""
        source = torch.from_numpy(rows)
        if self._device.type != "cpu":
            if not source.is_pinned():
                pinned = torch.empty(source.shape, dtype=torch.uint8, pin_memory=True)
                source = pinned.copy_(source)
            source = source.to(self._device, non_blocking=True)
        ids = torch.tensor(blocks, device=self._device)
        for part, start, end in zip(self._parts, self._starts, self._ends, strict=True):
            part.index_copy_(0, ids, source[:, start:end])

    def _gather(self, blocks: Sequence[int], rows: torch.Tensor) -> None:
        ids = torch.tensor(blocks, device=self._device)
        for part, start, end in zip(self._parts, self._starts, self._ends, strict=True):
            rows[:, start:end] = part.index_select(0, ids)


def _return_at_once() -> None:
    """Nothing is under way."""
