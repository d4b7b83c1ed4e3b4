"""Tiles of any number of rows, put together from those that have code of their own.

Above: `attention.py`, `linear.py`. Below: `vectors.py`. `half` is 1 where numbers are
stored as bfloat16, else 0.
"""

from __future__ import annotations

from numba import njit

from engine.kernels.cpu import vectors as v


@njit(error_model="numpy")
def multiply_words(rows, a, a_stride, b0, b1, b_stride, steps, c, c_stride):
    """C[rows, 32] += A[rows, steps] B[steps, 32] in float32; strides are bytes. The two halves of a
    row of B are at b0 and b1, b_stride apart from the next row."""
    while rows >= 12:
        v.words_12(a, a_stride, b0, b1, b_stride, steps, c, c_stride)
        a, c, rows = a + 12 * a_stride, c + 12 * c_stride, rows - 12
    if rows >= 8:
        v.words_8(a, a_stride, b0, b1, b_stride, steps, c, c_stride)
        a, c, rows = a + 8 * a_stride, c + 8 * c_stride, rows - 8
    if rows >= 6:
        v.words_6(a, a_stride, b0, b1, b_stride, steps, c, c_stride)
        a, c, rows = a + 6 * a_stride, c + 6 * c_stride, rows - 6
    if rows >= 4:
        v.words_4(a, a_stride, b0, b1, b_stride, steps, c, c_stride)
        a, c, rows = a + 4 * a_stride, c + 4 * c_stride, rows - 4
    if rows == 3:
        v.words_3(a, a_stride, b0, b1, b_stride, steps, c, c_stride)
    elif rows == 2:
        v.words_2(a, a_stride, b0, b1, b_stride, steps, c, c_stride)
    elif rows == 1:
        v.words_1(a, a_stride, b0, b1, b_stride, steps, c, c_stride)


@njit(error_model="numpy")
def multiply_pairs(rows, a, a_stride, b0, b1, b_stride, steps, c, c_stride):
    """As `multiply_words` on words of two bfloat16: row s of B holds inputs 2s and 2s + 1."""
    while rows >= 12:
        v.pairs_12(a, a_stride, b0, b1, b_stride, steps, c, c_stride)
        a, c, rows = a + 12 * a_stride, c + 12 * c_stride, rows - 12
    if rows >= 8:
        v.pairs_8(a, a_stride, b0, b1, b_stride, steps, c, c_stride)
        a, c, rows = a + 8 * a_stride, c + 8 * c_stride, rows - 8
    if rows >= 6:
        v.pairs_6(a, a_stride, b0, b1, b_stride, steps, c, c_stride)
        a, c, rows = a + 6 * a_stride, c + 6 * c_stride, rows - 6
    if rows >= 4:
        v.pairs_4(a, a_stride, b0, b1, b_stride, steps, c, c_stride)
        a, c, rows = a + 4 * a_stride, c + 4 * c_stride, rows - 4
    if rows == 3:
        v.pairs_3(a, a_stride, b0, b1, b_stride, steps, c, c_stride)
    elif rows == 2:
        v.pairs_2(a, a_stride, b0, b1, b_stride, steps, c, c_stride)
    elif rows == 1:
        v.pairs_1(a, a_stride, b0, b1, b_stride, steps, c, c_stride)


@njit(error_model="numpy")
def multiply(half, rows, a, a_stride, b0, b1, b_stride, steps, c, c_stride):
    if half:
        multiply_pairs(rows, a, a_stride, b0, b1, b_stride, steps, c, c_stride)
    else:
        multiply_words(rows, a, a_stride, b0, b1, b_stride, steps, c, c_stride)


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
