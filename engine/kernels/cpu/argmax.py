"""The place of the largest number of each row, and whether all of them are numbers.

    out[r] = the first i with x[r, i] = max x[r]; -1 if any x[r, i] is infinite or not a number

Lanes keep the first of their own largest, and its place as a float32, which is exact below 2^24;
the last vector overlaps the one before it.
"""

from __future__ import annotations

from numba import cfunc, njit, types

from engine.kernels.cpu import vectors as v
from engine.kernels.cpu.products import load

SIGNATURE = types.void(types.CPointer(types.int64))

COUNTER, ROWS, SIZE, X, OUT, HALF = range(6)
"""Arguments, all int64: rows are contiguous, SIZE >= 16 numbers each; OUT is int64 [ROWS]."""


@njit(error_model="numpy")
def _first_largest(x, size, half):
    lowest = types.float32(-float("inf"))
    best, where = v.splat(lowest), v.splat(types.float32(0.0))
    unsound = v.splat(types.float32(0.0))
    at, step = v.lanes(), v.splat(types.float32(16.0))
    for i in range(0, size, 16):
        if i + 16 > size:
            at = v.add(v.lanes(), v.splat(types.float32(size - 16)))
            i = size - 16
        value = load(half, x + (i * 4 >> half))
        unsound = v.add(unsound, v.subtract(value, value))
        where = v.if_larger(value, best, at, where)
        best = v.larger(value, best)
        at = v.add(at, step)
    if v.total(unsound) != types.float32(0.0):
        return types.int64(-1)
    most = v.splat(v.largest(best))
    # Of the lanes that hold the largest, the one whose place is the first.
    places = v.if_larger(
        most, best, v.splat(lowest), v.subtract(v.splat(types.float32(0.0)), where)
    )
    return types.int64(-v.largest(places))


@cfunc(SIGNATURE, error_model="numpy", cache=True)
def argmax(args):
    counter = v.address_of(args)
    half, size = args[HALF], args[SIZE]
    while True:
        row = v.next_index(counter)
        if row >= args[ROWS]:
            return
        place = _first_largest(args[X] + (row * size * 4 >> half), size, half)
        v.write_long(args[OUT] + row * 8, place)
