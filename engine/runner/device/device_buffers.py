"""A step's inputs: written once on the host, copied once, and found at places that do not move.

Knows no sequences.

All inputs of a step lie behind each other in one piece of pinned memory, which one copy brings to
the device. Where each lies follows from the sizes of the step alone (`StepLayout`), so that for a
CUDA graph, whose sizes are fixed, every input is always at the same address. There are two pinned
pieces in rotation: a step is written while the copy of the one before may still be queued.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.sampling.types import SamplingTensors
from engine.kernels.step_inputs.types import StepInputs
from engine.runner.batch.transfers import Transfers

ALIGNMENT = 16
"""The alignment of every input: kernels are compiled for addresses that are multiples of it."""
NUM_STAGINGS = 2
KINDS: dict[str, tuple[str, type[np.generic]]] = {
    # Name: what it is counted by, and its type here and on the device.
    "top_p": ("rows", np.float64),
    "seeds": ("rows", np.int64),
    "draw_positions": ("rows", np.int64),
    "token_ids": ("tokens", np.int64),
    "positions": ("tokens", np.int64),
    "slots": ("tokens", np.int64),
    "temperature": ("rows", np.float32),
    "log_min_p": ("rows", np.float32),
    "top_k": ("rows", np.int32),
    "sampling_rows": ("rows", np.int32),
    "query_start": ("starts", np.int32),
    "seq_lens": ("seqs", np.int32),
    "previous_rows": ("seqs", np.int32),
    "table_rows": ("seqs", np.int32),
    "first_changed": ("seqs", np.int32),
    "num_changed": ("seqs", np.int32),
    "changes_at": ("seqs", np.int32),
    "changes": ("changes", np.int32),
}
"""The inputs in their order: the changes of block tables, any number of them, are last."""
TORCH = {
    np.float64: torch.float64,
    np.int64: torch.int64,
    np.float32: torch.float32,
    np.int32: torch.int32,
}


class StepSize(NamedTuple):
    """The size of a step, padding included."""

    num_tokens: int
    num_seqs: int
    num_rows: int
    """The rows that tokens are sampled from."""


class StepLayout:
    """The place in bytes of each input of a step of this size."""

    def __init__(self, size: StepSize) -> None:
        self.size = size
        counts = {
            "tokens": size.num_tokens,
            "seqs": size.num_seqs,
            "starts": size.num_seqs + 1,
            "rows": size.num_rows,
            "changes": 0,
        }
        self._places: dict[str, tuple[int, int]] = {}
        at = 0
        for name, (counted_by, kind) in KINDS.items():
            self._places[name] = (at, counts[counted_by])
            length = counts[counted_by] * np.dtype(kind).itemsize
            at = -(-(at + length) // ALIGNMENT) * ALIGNMENT
        self.fixed_bytes = at
        """The bytes of all inputs but the changes, which begin there."""

    def on_host(self, memory: NDArray[np.uint8]) -> dict[str, NDArray[np.generic]]:
        """The inputs in staging memory; the changes have all the room that is left."""
        return {
            name: np.frombuffer(memory.data, KINDS[name][1], -1 if name == "changes" else count, at)
            for name, (at, count) in self._places.items()
        }

    def on_device(self, memory: Tensor) -> dict[str, Tensor]:
        """The same places in a uint8 tensor."""
        views = {}
        for name, (at, count) in self._places.items():
            kind = KINDS[name][1]
            end = None if name == "changes" else at + count * np.dtype(kind).itemsize
            views[name] = memory[at:end].view(TORCH[kind])
        return views


@cache
def layout_of(size: StepSize) -> StepLayout:
    """For the sizes of graphs, which come again and again."""
    return StepLayout(size)


class StagingBuffer:
    """One piece of memory that steps are written to on the host."""

    def __init__(self, transfers: Transfers, num_bytes: int) -> None:
        self._tensor = transfers.host_buffer(num_bytes)
        self._copied: torch.cuda.Event | None = None
        self._transfers = transfers
        self._memory: NDArray[np.uint8] = self._tensor.numpy()

    def open(self) -> NDArray[np.uint8]:
        """The memory, to be written. Its last copy is two steps old: nobody waits here, unless the
        device is so far behind."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._memory

    def send(self, device: Tensor, num_bytes: int) -> None:
        """Copy the first bytes to the device, behind what it was given before."""
        device[:num_bytes].copy_(self._tensor[:num_bytes], non_blocking=True)
        self._copied = self._transfers.event()


class DeviceBuffers:
    """The buffers that a runner keeps on the device from its first step to its last."""

    def __init__(
        self, device: torch.device, *, max_num_tokens: int, max_num_seqs: int, max_num_blocks: int
    ) -> None:
        """max_num_blocks: of one sequence."""
        self.max_num_blocks = -(-max_num_blocks // ALIGNMENT) * ALIGNMENT
        largest = StepLayout(StepSize(max_num_tokens, max_num_seqs, max_num_tokens))
        tables = (max_num_seqs, self.max_num_blocks)
        num_bytes = largest.fixed_bytes + 4 * max_num_seqs * self.max_num_blocks
        self.inputs = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.kept_tables = torch.zeros(tables, dtype=torch.int32, device=device)
        """A row for each sequence, as long as it is there."""
        self.tables = torch.zeros(tables, dtype=torch.int32, device=device)
        """Those of the step, in the order of its sequences."""
        self.drawn = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        """The tokens that the last step sampled, one per row; negative if none could be drawn."""
        transfers = Transfers(device)
        self._stagings = [StagingBuffer(transfers, num_bytes) for _ in range(NUM_STAGINGS)]

    @property
    def num_bytes(self) -> int:
        """On the device."""
        kept = (self.inputs, self.kept_tables, self.tables, self.drawn)
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)

    def next_staging(self) -> StagingBuffer:
        """The one that was used longest ago."""
        self._stagings.append(self._stagings.pop(0))
        return self._stagings[-1]


class StepViews:
    """The inputs of a step of one size on the device, in the form that those who read them want."""

    def __init__(self, buffers: DeviceBuffers, size: StepSize, layout: StepLayout) -> None:
        at = layout.on_device(buffers.inputs)
        self.token_ids, self.positions, self.slots = at["token_ids"], at["positions"], at["slots"]
        self.query_start, self.seq_lens = at["query_start"], at["seq_lens"]
        self.sampling_rows = at["sampling_rows"]
        self.tables = buffers.tables[: size.num_seqs]
        self.inputs = StepInputs(**{name: at[name] for name in StepInputs._fields})
        self.sampling = SamplingTensors(
            temperature=at["temperature"],
            log_min_p=at["log_min_p"],
            top_k=at["top_k"],
            top_p=at["top_p"],
            seeds=at["seeds"],
            positions=at["draw_positions"],
            adjustments=None,
        )
