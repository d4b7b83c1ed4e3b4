"""y = (x W^T) s + b for a few rows, over weights in int8 packed in panels of 32 outputs.

    y[m, n] = s[n] sum_k x[m, k] W[n, k] + b[n]        in float32, rounded once

A panel is [inputs, 32] bytes: it is read once for up to four rows, and widened in registers.
Threads draw panels from a counter.
"""

from __future__ import annotations

from numba import cfunc, njit, types

from engine.kernels.cpu import tiles
from engine.kernels.cpu import vectors as v
from engine.kernels.cpu.products import put
from engine.kernels.cpu.tiles import tile_memory

COUNTER, X, X_STRIDE, WEIGHT, STEPS, Y, Y_STRIDE, BIAS, ROWS, OUTPUTS, PANELS, HALF, SCALE = range(
    13
)
"""Arguments, all int64; strides are bytes, STEPS the words of a row of x, SCALE and BIAS float32
[PANELS * 32], BIAS may be 0."""
SIGNATURE = types.void(types.CPointer(types.int64))


def _in_tiles(kinds):
    four, three, two, one = kinds

    @njit(error_model="numpy")
    def multiply(rows, a, a_stride, b, following, steps, c):
        while rows >= 4:
            four(a, a_stride, b, following, steps, c, 128)
            a, c, rows = a + 4 * a_stride, c + 4 * 128, rows - 4
        if rows == 3:
            three(a, a_stride, b, following, steps, c, 128)
        elif rows == 2:
            two(a, a_stride, b, following, steps, c, 128)
        elif rows == 1:
            one(a, a_stride, b, following, steps, c, 128)

    return multiply


_multiply_words = _in_tiles(tiles.BYTES_OF_WORDS)
_multiply_pairs = _in_tiles(tiles.BYTES_OF_PAIRS)


@njit(error_model="numpy")
def _finish(args, tile, panel, rows):
    """Scale a tile and add the bias."""
    for part in range(2):
        scale = v.load(args[SCALE] + panel * 128 + part * 64)
        bias = v.splat(types.float32(0.0))
        if args[BIAS] != 0:
            bias = v.load(args[BIAS] + panel * 128 + part * 64)
        for row in range(rows):
            at = tile + row * 128 + part * 64
            v.store(at, v.fused(v.load(at), scale, bias))


@cfunc(SIGNATURE, error_model="numpy", cache=True)
def int8_linear(args):
    tile = tile_memory()
    steps, half, rows = args[STEPS], args[HALF], args[ROWS]
    counter = v.address_of(args)
    panel_bytes = steps * 32 << half
    panel = v.next_index(counter)
    while panel < args[PANELS]:
        behind = v.next_index(counter)
        weight = args[WEIGHT] + panel * panel_bytes
        following = args[WEIGHT] + behind % args[PANELS] * panel_bytes
        if half:
            _multiply_pairs(rows, args[X], args[X_STRIDE], weight, following, steps, tile)
        else:
            _multiply_words(rows, args[X], args[X_STRIDE], weight, following, steps, tile)
        _finish(args, tile, panel, rows)
        size = 4 >> half
        left = min(32, args[OUTPUTS] - panel * 32)
        for row in range(rows):
            y = args[Y] + row * args[Y_STRIDE] + panel * 32 * size
            put(half, tile + row * 128, y, left)
        panel = behind
