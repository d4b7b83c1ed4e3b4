"""y[t] += B_s A_s x[t] for tokens t of adapter s (LoRA, arXiv:2106.09685), all adapters of a batch
in one go (Punica's SGMV, arXiv:2310.18547).

Knows no names. A layer may be several projections of one input side by side: each has its own A and
B, and its own columns of y. Scales lie in B; adapters of smaller rank, and those that leave a
projection alone, are filled with zeros.

On a CPU, and as the reference, each adapter's rows are gathered, multiplied and added back. On a
GPU a shrinking and an expanding kernel run over tiles of rows that have one adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.backend import uses_triton
from engine.kernels.linear.dispatch import LinearKernel, pack_linear

BLOCK_M = 16
"""Rows of a tile: the fewest that the matrix units take."""
MIN_RANK = 16
"""Ranks are filled up to a power of two, at least this: a dot takes no less."""
NOBODY = -1


class SlotProducts(NamedTuple):
    """One adapter's products in one layer."""

    shrink: LinearKernel
    """By A of all parts."""
    expand: tuple[LinearKernel, ...]
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


def add_lora(y: Tensor, x: Tensor, stack: LoraStack, rows: LoraRows) -> None:
    """Add what the adapters of `rows` make of x [T, K] to y [T, N], in place."""
    if rows.empty:
        return
    if uses_triton(x.device):
        from engine.kernels.mixture import lora_triton

        lora_triton.add(y, x, stack, rows)
        return
    for slot, own in rows.groups:
        every = len(own) == len(x)
        shrink, expand = _products(stack, slot)
        shrunk = shrink(x if every else x.index_select(0, own))
        inner = shrunk.split(stack.rank, dim=1)
        deltas = [by_b(part) for by_b, part in zip(expand, inner, strict=True)]
        delta = deltas[0] if len(deltas) == 1 else torch.cat(deltas, dim=1)
        if every:
            y.add_(delta)
        else:
            y.index_add_(0, own, delta)


def _products(stack: LoraStack, slot: int) -> SlotProducts:
    if stack.products is not None:
        return stack.products[slot]
    parts = _parts_of_b(stack, slot)
    return SlotProducts(
        lambda x: x @ stack.a[slot].t(),
        tuple(lambda x, part=part: x @ part.t() for part in parts),  # type: ignore[misc]
    )


def _parts_of_b(stack: LoraStack, slot: int) -> list[Tensor]:
    starts = (0, *stack.part_ends[:-1])
    return [stack.b[slot, i:j] for i, j in zip(starts, stack.part_ends, strict=True)]


def deterministic(stack: LoraStack) -> LoraStack:
    """The same, but what it adds to a row depends on that row alone. Kernels are so anyway."""
    if uses_triton(stack.a.device):
        return stack

    def pack(weight: Tensor) -> LinearKernel:
        return pack_linear(weight, None, deterministic=True)

    products = tuple(
        SlotProducts(pack(stack.a[slot]), tuple(map(pack, _parts_of_b(stack, slot))))
        for slot in range(len(stack.a))
    )
    return replace(stack, products=products)


def stack_adapters(
    adapters: Sequence[Sequence[tuple[Tensor, Tensor] | None]],
    sizes: Sequence[int],
    example: Tensor,
) -> LoraStack:
    """adapters: for each slot and part, A [r, K] and B [n, r] with its scale in it, or None.
    sizes: n of each part. example: of the dtype and on the device of the result, [K] wide."""
    pairs = [pair for parts in adapters for pair in parts if pair is not None]
    largest = max(len(a) for a, _ in pairs)
    rank = max(MIN_RANK, 1 << (largest - 1).bit_length())
    num_inputs = pairs[0][0].shape[1]
    stacked_a = example.new_zeros(len(adapters), len(sizes) * rank, num_inputs)
    stacked_b = example.new_zeros(len(adapters), sum(sizes), rank)
    ends: list[int] = []
    for part, size in enumerate(sizes):
        start = sum(sizes[:part])
        ends.append(start + size)
        for slot, parts in enumerate(adapters):
            pair = parts[part]
            if pair is not None:
                a, b = pair
                stacked_a[slot, part * rank : part * rank + len(a)] = a
                stacked_b[slot, start : start + size, : b.shape[1]] = b
    on_device = torch.tensor(ends, dtype=torch.int32, device=example.device)
    return LoraStack(stacked_a, stacked_b, tuple(ends), on_device)
