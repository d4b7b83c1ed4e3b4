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
from dataclasses import replace

import torch
from torch import Tensor

from engine.kernels.backend import uses_triton
from engine.kernels.linear.dispatch import LinearKernel, pack_linear
from engine.kernels.mixture.types import LoraRows, LoraStack, SlotProducts

MIN_RANK = 16
"""Ranks are filled up to a power of two, at least this: a dot takes no less."""


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
