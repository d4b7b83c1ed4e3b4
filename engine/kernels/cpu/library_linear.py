"""y = x W^T + b on bfloat16 by a library's product, over the panels of `linear`.

Apart from it because only whoever measures or chose the library asks for it: a first start compiles
what its first token needs.
"""

from __future__ import annotations

from numba import cfunc, njit, types

from engine.kernels.cpu import vectors as v
from engine.kernels.cpu.products import put
from engine.kernels.cpu.tiles import BLOCK_ROWS, block_memory

(
    COUNTER,
    X,
    X_STRIDE,
    WEIGHT,
    STEPS,
    Y,
    Y_STRIDE,
    BIAS,
    ROWS,
    OUTPUTS,
    PANELS,
    HALF,
    PRODUCT,
    RELEASE,
) = range(14)
"""Arguments, all int64: those of `linear`, and a `Microkernel`."""
ROWS_STEP = 16
"""A block of rows that is not full is multiplied in whole steps, then the rest: a library compiles
for few sizes."""
SIGNATURE = types.void(types.CPointer(types.int64))


@njit(error_model="numpy")
def _multiply_block(args, x, weight, tile, rows):
    """tile[rows, 32] = x W^T of one panel, by the library"""
    depth, stride = args[STEPS] * 2, args[X_STRIDE] >> 1
    whole = rows if rows == BLOCK_ROWS else rows // ROWS_STEP * ROWS_STEP
    if whole > 0:
        v.library_product(args[PRODUCT], whole, 32, depth, stride, 32, 32, 0, x, weight, tile, 1)
    if whole < rows:
        x, tile = x + whole * args[X_STRIDE], tile + whole * 128
        left = rows - whole
        v.library_product(args[PRODUCT], left, 32, depth, stride, 32, 32, 0, x, weight, tile, 1)


@cfunc(SIGNATURE, error_model="numpy", cache=True)
def library_linear(args):
    tile = block_memory()
    blocks = (args[ROWS] + BLOCK_ROWS - 1) // BLOCK_ROWS
    counter = v.address_of(args)
    index, total = v.next_index(counter), blocks * args[PANELS]
    while index < total:
        first, panel = index // args[PANELS] * BLOCK_ROWS, index % args[PANELS]
        rows = min(BLOCK_ROWS, args[ROWS] - first)
        weight = args[WEIGHT] + panel * args[STEPS] * 128
        _multiply_block(args, args[X] + first * args[X_STRIDE], weight, tile, rows)
        left = min(32, args[OUTPUTS] - panel * 32)
        for row in range(rows):
            at = tile + row * 128
            if args[BIAS] != 0:
                for part in range(0, 128, 64):
                    bias = v.load(args[BIAS] + panel * 128 + part)
                    v.store(at + part, v.add(v.load(at + part), bias))
            put(1, at, args[Y] + (first + row) * args[Y_STRIDE] + panel * 64, left)
        index = v.next_index(counter)
    v.call(args[RELEASE], 1)
