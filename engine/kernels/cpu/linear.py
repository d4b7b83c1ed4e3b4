"""y = x W^T + b over weights packed in panels of 32 outputs.

    y[m, n] = sum_k x[m, k] W[n, k] + b[n]        in float32, rounded once

A panel is [steps, 32] words: for each step the words of all 32 outputs, so that one pass reads it
from end to end. Threads draw (block of rows, panel) pairs from a counter; all rows of a block meet
a panel while it is in the cache.
"""

from __future__ import annotations

from numba import cfunc, njit, types

from engine.kernels.cpu import vectors as v
from engine.kernels.cpu.products import hold_stream, put, stream
from engine.kernels.cpu.tiles import MAX_ROWS, tile_memory

BLOCK_ROWS = 96
"""x of that many rows stays in the cache while panels pass."""

COUNTER, X, X_STRIDE, WEIGHT, STEPS, Y, Y_STRIDE, BIAS, ROWS, OUTPUTS, PANELS, HALF = range(12)
"""Arguments, all int64; strides are bytes, BIAS is float32 [PANELS * 32] or 0."""
SIGNATURE = types.void(types.CPointer(types.int64))


@njit(error_model="numpy")
def _start(args, tile, panel, rows):
    """Fill a tile with the bias, or nothing."""
    zero = v.splat(types.float32(0.0))
    first, second = zero, zero
    if args[BIAS] != 0:
        first = v.load(args[BIAS] + panel * 128)
        second = v.load(args[BIAS] + panel * 128 + 64)
    for row in range(rows):
        v.store(tile + row * 128, first)
        v.store(tile + row * 128 + 64, second)


@cfunc(SIGNATURE, error_model="numpy", cache=True)
def linear(args):
    hold_stream()
    tile = tile_memory()
    blocks = (args[ROWS] + BLOCK_ROWS - 1) // BLOCK_ROWS
    steps, half = args[STEPS], args[HALF]
    size = 4 >> half
    counter = v.address_of(args)
    index, total = v.next_index(counter), blocks * args[PANELS]
    while index < total:
        behind = v.next_index(counter)
        first, panel = index // args[PANELS] * BLOCK_ROWS, index % args[PANELS]
        weight = args[WEIGHT] + panel * steps * 128
        following = args[WEIGHT] + behind % args[PANELS] * steps * 128
        left = min(32, args[OUTPUTS] - panel * 32)
        last = min(first + BLOCK_ROWS, args[ROWS])
        for row in range(first, last, MAX_ROWS):
            rows = min(MAX_ROWS, last - row)
            _start(args, tile, panel, rows)
            x, stride = args[X] + row * args[X_STRIDE], args[X_STRIDE]
            further = following if row + rows == last else weight
            stream(half, rows, x, stride, weight, further, steps, tile, 128)
            for i in range(rows):
                y = args[Y] + (row + i) * args[Y_STRIDE] + panel * 32 * size
                put(half, tile + i * 128, y, left)
        index = behind
