"""The stacked weights of adapters and of experts, and which rows of a step have which adapter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.backend import uses_triton

BLOCK_M = 16
"""Rows of a tile: the fewest that the matrix units take."""
NOBODY = -1


class SlotProducts(NamedTuple):
    """One adapter's products in one layer."""

    shrink: Callable[[Tensor], Tensor]
    """By A of all parts."""
    expand: tuple[Callable[[Tensor], Tensor], ...]
    """By B of each part."""


@dataclass(frozen=True, slots=True)
class LoraStack:
    """One layer's adapters; slot s stands at s."""

    a: Tensor
    """[slots, parts * rank, K]"""
    b: Tensor
    """[slots, N, rank]: the rows of a part are its columns of y"""
    part_ends: tuple[int, ...]
    """The end of each part in N."""
    part_ends_on_device: Tensor
    """The same, int32."""
    products: tuple[SlotProducts, ...] | None = None
    """By slot, where torch's choice of a product must not tell how many rows there were."""

    @property
    def rank(self) -> int:
        return self.b.shape[2]


@dataclass(slots=True)
class LoraRows:
    """The rows of a step by their adapter. The tensors keep their place from step to step as long
    as they suffice, so that a CUDA graph captured over them stays right.
    """

    device: torch.device
    num_slots: int
    groups: list[tuple[int, Tensor]] = field(default_factory=list)
    """(slot, its rows int64), on a device without kernels"""
    tiles: int = 0
    """Upper bound of the tiles of a step with so many rows and slots"""
    rows: Tensor = field(init=False)
    """int32 [tiles * BLOCK_M], NOBODY behind the last of an adapter; of a tile that is not used,
    anything"""
    tile_slots: Tensor = field(init=False)
    """int32 [tiles], NOBODY for a tile that is not used"""

    def __post_init__(self) -> None:
        self.reserve(1)

    def reserve(self, num_rows: int) -> None:
        """Make room for steps of `num_rows`; moves the tensors."""
        tiles = self._bound(num_rows)
        self.rows = torch.full((tiles * BLOCK_M,), NOBODY, dtype=torch.int32, device=self.device)
        self.tile_slots = torch.full((tiles,), NOBODY, dtype=torch.int32, device=self.device)

    def assign(self, slots: Sequence[tuple[int, int]]) -> None:
        """slots: (slot or NOBODY, rows that have it), in the order of the rows."""
        rows_of: dict[int, list[int]] = {}
        start = 0
        for slot, count in slots:
            if slot != NOBODY:
                rows_of.setdefault(slot, []).extend(range(start, start + count))
            start += count
        if uses_triton(self.device):
            self._lay_out(rows_of, start)
        else:
            self.groups = [(slot, torch.tensor(rows)) for slot, rows in rows_of.items()]

    @property
    def empty(self) -> bool:
        return not self.tiles and not self.groups

    def _bound(self, num_rows: int) -> int:
        """Tiles that are enough for `num_rows`, however the adapters share them."""
        return (num_rows + min(self.num_slots, num_rows) * (BLOCK_M - 1)) // BLOCK_M

    def _lay_out(self, rows_of: dict[int, list[int]], num_rows: int) -> None:
        self.tiles = self._bound(num_rows) if rows_of else 0
        if self.tiles > len(self.tile_slots):
            self.reserve(num_rows)
        rows: list[int] = []
        tile_slots: list[int] = []
        for slot, own in rows_of.items():
            tiles = -(-len(own) // BLOCK_M)
            rows += own + [NOBODY] * (tiles * BLOCK_M - len(own))
            tile_slots += [slot] * tiles
        tile_slots += [NOBODY] * (len(self.tile_slots) - len(tile_slots))
        self._send(rows, self.rows)
        self._send(tile_slots, self.tile_slots)

    @staticmethod
    def _send(values: list[int], place: Tensor) -> None:
        """Put them under way to the front of `place`; the host does not wait for the device."""
        host = torch.tensor(values, dtype=torch.int32)
        if place.device.type == "cuda":
            host = host.pin_memory()
        place[: len(host)].copy_(host, non_blocking=True)


class WeightKind(IntEnum):
    """How the grouped product reads a weight."""

    DENSE = 0
    CHANNEL = 1
    """int8 or float8, a scale for every output"""
    BLOCK = 2
    """float8, a scale for every block"""
    GROUPED = 3
    """4- or 8-bit codes, a scale and a zero point for every group of inputs"""


@dataclass(frozen=True, slots=True)
class Stack:
    """The weights of all experts, [E, N, K] in one form."""

    kind: WeightKind
    values: Tensor
    """[E, N, K], or codes uint8 [E, N, K * bits / 8] as `int4_linear.py` packs them"""
    scales: Tensor | None
    """float: CHANNEL [E, N], BLOCK [E, N / rows, K / columns], GROUPED [E, groups, N]"""
    zeros: Tensor | None
    """int16 [E, groups, N]"""
    num_inputs: int
    rows: int = 1
    """The rows of a block."""
    columns: int = 0
    """The columns of a block, or the inputs of a group."""
    bits: int = 8
    span: int = 0
