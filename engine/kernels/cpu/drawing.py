"""Computes what a draw reads all of a row for: what a grammar forbids, and how much weight lies
where.

    forbid: x[r, i] <- -inf where bit i of mask r is clear
    masses: out[r, b] = sum of w over block b of row r, w = e^z if z >= floor[r] else 0,
            z = (x[r, i] - best[r]) / temperature[r]

Numbers are float32; a row's blocks are summed sixteen lanes at a time, so a block's sum is within
some units in its last place.
"""

from __future__ import annotations

from numba import cfunc, njit, types

from engine.kernels.cpu import vectors as v

SIGNATURE = types.void(types.CPointer(types.int64))
BLOCK = 512
"""Tokens of a row that are summed to one number."""

COUNTER, ROWS, SIZE, X, MASKS = range(5)
"""Arguments of `forbid`, all int64: X is [ROWS, SIZE], MASKS [ROWS, SIZE / 32] words of 32 bits,
from the lowest of the first word on; SIZE is a multiple of 32."""
BEST, TEMPERATURE, FLOOR, ROW_OF, OUT = range(4, 9)
"""Further ones of `masses`: float32 [ROWS] each; ROW_OF int64 [ROWS], the row of X; OUT float32
[ROWS, blocks]. SIZE is a multiple of 16."""
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
