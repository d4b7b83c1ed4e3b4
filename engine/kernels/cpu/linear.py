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
from engine.kernels.cpu.tiles import AHEAD, BLOCK_ROWS, MAX_ROWS, tile_memory

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
) = range(12)
"""Arguments, all int64; strides are bytes, BIAS is float32 [PANELS * 32] or 0."""
ROW_BYTES = 128
"""The bytes of a row of a panel, and of a tile."""
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


@njit(error_model="numpy")
def _stream_panel(args, x, rows, weight, following, tile):
    """tile += x W^T of the only rows that meet a panel: it is asked for a little ahead, and so is
    the following one behind its end."""
    half, steps, stride = args[HALF], args[STEPS], args[X_STRIDE]
    before = max(0, steps - AHEAD // ROW_BYTES)
    if before > 0:
        ahead = weight + AHEAD
        stream(half, rows, x, stride, weight, ahead, ROW_BYTES, before, tile, ROW_BYTES)
    x, weight = x + before * 4, weight + before * ROW_BYTES
    stream(half, rows, x, stride, weight, following, ROW_BYTES, steps - before, tile, ROW_BYTES)


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
        weight = args[WEIGHT] + panel * steps * ROW_BYTES
        following = args[WEIGHT] + behind % args[PANELS] * steps * ROW_BYTES
        left = min(32, args[OUTPUTS] - panel * 32)
        last = min(first + BLOCK_ROWS, args[ROWS])
        # Of several tiles each asks for a part of the following panel.
        pace = ROW_BYTES // ((last - first + MAX_ROWS - 1) // MAX_ROWS)
        for row in range(first, last, MAX_ROWS):
            rows = min(MAX_ROWS, last - row)
            _start(args, tile, panel, rows)
            x, stride = args[X] + row * args[X_STRIDE], args[X_STRIDE]
            if pace == ROW_BYTES:
                _stream_panel(args, x, rows, weight, following, tile)
            else:
                stream(half, rows, x, stride, weight, following, pace, steps, tile, ROW_BYTES)
                following += pace * steps
            for i in range(rows):
                y = args[Y] + (row + i) * args[Y_STRIDE] + panel * 32 * size
                put(half, tile + i * ROW_BYTES, y, left)
        index = behind
