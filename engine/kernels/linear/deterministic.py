"""Dense products in which a row's bits depend on that row and the weight alone.

    y = x W^T + b

Knows no form of weights but the dense one.

Libraries choose a kernel, and with it an order of sums, by the number of rows: oneDNN's float32
product of 1,536 inputs gives a row other bits in a batch of 17 than alone. A kernel of one shape
keeps one order. On a GPU that is a kernel of our own; elsewhere the library's, which is given tiles
of TILE_ROWS rows and nothing else. That no row's place in a tile shows either is not promised by
oneDNN; it was tried for float32, bfloat16 and float16, and a test tries it again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.kernels.backend import uses_triton

TILE_ROWS = 16


def has_kernel(weight: Tensor) -> bool:
    return uses_triton(weight.device)


def pack(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Through the Triton kernel; `weight` [N, K]."""
    from engine.kernels.linear import deterministic_triton as deterministic_linear_triton

    num_outputs, num_inputs = weight.shape
    weight = weight.contiguous()

    def product(x: Tensor) -> Tensor:
        y = deterministic_linear_triton.multiply(x.reshape(-1, num_inputs), weight, bias)
        return y.view(*x.shape[:-1], num_outputs)

    return product


def in_tiles(product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`product`, of tiles of TILE_ROWS rows only, the last one filled up with zeros."""

    def tiled(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        num_tiles = max(1, -(-len(rows) // TILE_ROWS))
        padded = rows.new_zeros(num_tiles * TILE_ROWS, rows.shape[1])
        padded[: len(rows)] = rows
        y = torch.cat([product(tile) for tile in padded.split(TILE_ROWS)])
        return y[: len(rows)].view(*x.shape[:-1], y.shape[1])

    return tiled
