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
from engine.kernels.cpu.tiles import AHEAD, BLOCK_ROWS, MAX_ROWS, block_memory, tile_memory

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
"""Arguments, all int64; strides are bytes, BIAS is float32 [PANELS * 32] or 0. PRODUCT and RELEASE
are those of `library_linear`: a `Microkernel`."""
ROWS_STEP = 16
"""A block of rows that is not full is multiplied in whole steps, then the rest: a library compiles
for few sizes."""
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
    """The same on bfloat16 by a library's product, on the same panels."""
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
