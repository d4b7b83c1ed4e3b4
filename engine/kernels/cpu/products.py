"""Tiles of any number of rows, put together from those that have code of their own.

`half` is 1 where numbers are stored as bfloat16, else 0.
"""

from __future__ import annotations

from numba import njit

from engine.kernels.cpu import tiles
from engine.kernels.cpu import vectors as v


def _in_tiles(kinds):
    """kinds: tiles of 12, 8, 6, 4, 3, 2 and 1 rows."""
    twelve, eight, six, four, three, two, one = kinds

    @njit(error_model="numpy")
    def multiply(rows, a, a_stride, b0, b1, b_stride, steps, c, c_stride):
        while rows >= 12:
            twelve(a, a_stride, b0, b1, b_stride, steps, c, c_stride)
            a, c, rows = a + 12 * a_stride, c + 12 * c_stride, rows - 12
        if rows >= 8:
            eight(a, a_stride, b0, b1, b_stride, steps, c, c_stride)
            a, c, rows = a + 8 * a_stride, c + 8 * c_stride, rows - 8
        if rows >= 6:
            six(a, a_stride, b0, b1, b_stride, steps, c, c_stride)
            a, c, rows = a + 6 * a_stride, c + 6 * c_stride, rows - 6
        if rows >= 4:
            four(a, a_stride, b0, b1, b_stride, steps, c, c_stride)
            a, c, rows = a + 4 * a_stride, c + 4 * c_stride, rows - 4
        if rows == 3:
            three(a, a_stride, b0, b1, b_stride, steps, c, c_stride)
        elif rows == 2:
            two(a, a_stride, b0, b1, b_stride, steps, c, c_stride)
        elif rows == 1:
            one(a, a_stride, b0, b1, b_stride, steps, c, c_stride)

    return multiply


_words, _streamed_words = _in_tiles(tiles.WORDS), _in_tiles(tiles.STREAMED_WORDS)
_pairs, _streamed_pairs = _in_tiles(tiles.PAIRS), _in_tiles(tiles.STREAMED_PAIRS)


@njit(error_model="numpy")
def multiply(half, rows, a, a_stride, b0, b1, b_stride, steps, c, c_stride):
    """C[rows, 32] += A[rows, steps] B[steps, 32] on words, of one float32 or two bfloat16; strides
    are bytes. The two halves of a row of B are at b0 and b1, b_stride apart from the next row."""
    if half:
        _pairs(rows, a, a_stride, b0, b1, b_stride, steps, c, c_stride)
    else:
        _words(rows, a, a_stride, b0, b1, b_stride, steps, c, c_stride)


@njit(error_model="numpy")
def stream(half, rows, a, a_stride, b, following, steps, c, c_stride):
    """As `multiply` with a B in one stretch of memory; what is read next begins at `following`."""
    if half:
        _streamed_pairs(rows, a, a_stride, b, following, 0, steps, c, c_stride)
    else:
        _streamed_words(rows, a, a_stride, b, following, 0, steps, c, c_stride)


@njit(error_model="numpy")
def load(half, address):
    """16 numbers, widened"""
    if half:
        return v.load_half(address)
    return v.load(address)


@njit(error_model="numpy")
def store(half, address, value):
    if half:
        v.store_half(address, value)
    else:
        v.store(address, value)


@njit(error_model="numpy")
def put(half, row, at, count):
    """Round a finished row of a tile, float32 [32], and write its first `count` numbers."""
    one, two = v.load(row), v.load(row + 64)
    if count == 32:
        store(half, at, one)
        store(half, at + (64 >> half), two)
        return
    store(half, row, one)
    store(half, row + (64 >> half), two)
    for j in range(count):
        if half:
            v.write_short(at + j * 2, v.read_short(row + j * 2))
        else:
            v.write_float(at + j * 4, v.read_float(row + j * 4))
