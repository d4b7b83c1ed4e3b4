"""Computes what a draw reads all of a row for: what a grammar forbids, and how much weight lies
where, or which number is the largest.

    forbid: x[r, i] <- -inf where bit i of mask r is clear
    masses: out[r, b] = sum of w over block b of row r, w = e^z if z >= floor[r] else 0,
            z = (x[r, i] - best[r]) / temperature[r]
    argmax: out[r] = the first i with x[r, i] = max x[r]; -1 if any x[r, i] is infinite or not a
            number

Numbers are float32, for argmax also bfloat16; a row's blocks are summed sixteen lanes at a time, so
a block's sum is within some units in its last place.
"""

from __future__ import annotations

from numba import cfunc, njit, types

from engine.kernels.cpu import vectors as v
from engine.kernels.cpu.products import load

SIGNATURE = types.void(types.CPointer(types.int64))
BLOCK = 512
"""Tokens of a row that are summed to one number."""

COUNTER, ROWS, SIZE, X, MASKS = range(5)
"""Arguments of `forbid`, all int64: X is [ROWS, SIZE], MASKS [ROWS, SIZE / 32] words of 32 bits,
from the lowest of the first word on; SIZE is a multiple of 32."""
BEST, TEMPERATURE, FLOOR, ROW_OF, OUT = range(4, 9)
"""Further ones of `masses`: float32 [ROWS] each; ROW_OF int64 [ROWS], the row of X; OUT float32
[ROWS, blocks]. SIZE is a multiple of 16."""
PLACES, HALF = 4, 5
"""Further ones of `argmax`: int64 [ROWS]. SIZE is at least 16; lanes keep the first of their own
largest, and its place as a float32, which is exact below 2^24; the last vector overlaps the one
before it."""
ALL, HALF_WORD = 0xFFFFFFFF, 0xFFFF


@njit(error_model="numpy")
def _forbid_row(x, mask, size):
    for word in range(size // 32):
        bits = types.int64(v.read_word(mask + word * 4))
        if bits != ALL:
            at = x + word * 128
            v.store(at, v.where(bits & HALF_WORD, v.load(at)))
            v.store(at + 64, v.where(bits >> 16, v.load(at + 64)))


@cfunc(SIGNATURE, error_model="numpy", cache=True)
def forbid(args):
    counter = v.address_of(args)
    size = args[SIZE]
    while True:
        row = v.next_index(counter)
        if row >= args[ROWS]:
            return
        _forbid_row(args[X] + row * size * 4, args[MASKS] + row * (size // 32) * 4, size)


@njit(error_model="numpy")
def _sum_blocks(x, size, best, temperature, floor, out):
    most, scale = v.splat(best), v.splat(temperature)
    least, nothing = v.splat(floor), v.splat(types.float32(0.0))
    for first in range(0, size, BLOCK):
        mass = v.splat(types.float32(0.0))
        for i in range(first, min(first + BLOCK, size), 16):
            z = v.divide(v.subtract(v.load(x + i * 4), most), scale)
            mass = v.add(mass, v.if_larger(least, z, nothing, v.exponential(z)))
        v.write_float(out + first // BLOCK * 4, v.total(mass))


@cfunc(SIGNATURE, error_model="numpy", cache=True)
def masses(args):
    counter = v.address_of(args)
    size = args[SIZE]
    num_blocks = (size + BLOCK - 1) // BLOCK
    while True:
        i = v.next_index(counter)
        if i >= args[ROWS]:
            return
        row = v.read_long(args[ROW_OF] + i * 8)
        _sum_blocks(
            args[X] + row * size * 4,
            size,
            v.read_float(args[BEST] + i * 4),
            v.read_float(args[TEMPERATURE] + i * 4),
            v.read_float(args[FLOOR] + i * 4),
            args[OUT] + i * num_blocks * 4,
        )


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
        v.write_long(args[PLACES] + row * 8, place)
