"""The products that functions of a kernel call by their names, and the kernel itself holds.

numba compiles a function again with each one that calls it. What takes longest of a kernel, the
tiles, is therefore declared where it is called, and defined once, by `hold_...` in the kernel.
`half` is 1 where numbers are stored as bfloat16, else 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.kernels.cpu import emit as e
from engine.kernels.cpu import tiles
from engine.kernels.cpu import vectors as v

PREFIX = "tollgate_product_"


def _declared(name: str) -> Any:
    # Functions on the way to a kernel are linked, too, though nobody runs them by themselves.
    llvmlite.binding.add_symbol(PREFIX + name, 1)

    @intrinsic
    def call(
        context: Any,
        rows: Any,
        a: Any,
        a_stride: Any,
        b: Any,
        b_place: Any,
        b_stride: Any,
        steps: Any,
        c: Any,
        c_stride: Any,
    ) -> Any:
        def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
            e.call(builder, PREFIX + name, ir.VoidType(), *args)

        return types.void(*[types.int64] * tiles.NUM_ARGUMENTS), generate

    return call


def _definition(names: Sequence[str], *layouts: tiles.Layout, counts: Sequence[int]) -> Any:
    """names: of the product on float32 and of that on bfloat16. layouts: alike. counts: the rows of
    their tiles."""

    @intrinsic
    def hold(context: Any) -> Any:
        def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
            both = zip(names, (tiles.words, tiles.pairs), layouts, strict=True)
            for name, step_product, layout in both:
                tiles.emit_product(builder.module, PREFIX + name, step_product, layout, counts)

        return types.void(), generate

    return hold


PLAIN, STREAMED = ("words", "pairs"), ("streamed_words", "streamed_pairs")
PAGED = ("paged_words", "paged_pairs")
_words, _pairs = map(_declared, PLAIN)
_streamed_words, _streamed_pairs = map(_declared, STREAMED)
_paged_words, _paged_pairs = map(_declared, PAGED)
hold_multiply = _definition(PLAIN, tiles.two_halves, tiles.two_halves, counts=tiles.ROWS)
hold_stream = _definition(STREAMED, tiles.one_stretch, tiles.one_stretch, counts=tiles.ROWS)
hold_multiply_paged = _definition(
    PAGED, tiles.in_blocks(4), tiles.in_blocks(3), counts=tiles.PROMPT_ROWS
)
"""The definitions of what `multiply`, `stream` and `multiply_paged` call: those of them in each
kernel that does."""


@njit(error_model="numpy")
def multiply(half, rows, a, a_stride, b0, b1, b_stride, steps, c, c_stride):
    """C[rows, 32] += A[rows, steps] B[steps, 32] on words, of one float32 or two bfloat16; strides
    are bytes. The two halves of a row of B are at b0 and b1, b_stride apart from the next row."""
    if half:
        _pairs(rows, a, a_stride, b0, b1, b_stride, steps, c, c_stride)
    else:
        _words(rows, a, a_stride, b0, b1, b_stride, steps, c, c_stride)


@njit(error_model="numpy")
def stream(half, rows, a, a_stride, b, ahead, pace, steps, c, c_stride):
    """As `multiply` with a B in one stretch of memory; with each step `pace` bytes more of what is
    at `ahead` are asked for."""
    if half:
        _streamed_pairs(rows, a, a_stride, b, ahead, pace, steps, c, c_stride)
    else:
        _streamed_words(rows, a, a_stride, b, ahead, pace, steps, c, c_stride)


@njit(error_model="numpy")
def multiply_paged(half, rows, a, a_stride, b, table, size, steps, c, c_stride):
    """As `multiply` with a B in blocks of 16 keys: the n-th is table[n] * size bytes from `b`, and
    its rows are as far apart as those of C."""
    if half:
        _paged_pairs(rows, a, a_stride, b, table, size, steps, c, c_stride)
    else:
        _paged_words(rows, a, a_stride, b, table, size, steps, c, c_stride)


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
