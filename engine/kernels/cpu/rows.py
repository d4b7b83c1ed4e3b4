"""Computes row by row what lies between products: the norm after a residual addition, and SwiGLU's
gate.

    add_rms_norm: residual <- residual + delta; out = residual / sqrt(mean(residual^2) + eps) weight
    swiglu: out = silu(gate) * up,  silu(z) = z / (1 + exp(-z))

Computed in float32; the residual is rounded before it is normalised.
"""

from __future__ import annotations

from numba import cfunc, njit, types

from engine.kernels.cpu import vectors as v
from engine.kernels.cpu.products import load, store

SIGNATURE = types.void(types.CPointer(types.int64))
CHUNK = 16
"""Rows a thread draws at once."""

COUNTER, ROWS, SIZE, DELTA, RESIDUAL, WEIGHT, OUT, EPS, HALF = range(9)
"""Arguments of `add_rms_norm`, all int64: rows are contiguous, SIZE numbers each, DELTA 0 for none,
EPS the bits of a float32."""
GATE_UP = 3
"""The input of `swiglu`: [ROWS, 2 * SIZE], in place of DELTA."""


@njit(error_model="numpy")
def _normalise_row(args, row):
    half, size = args[HALF], args[SIZE]
    shift = row * size * 4 >> half
    residual, out = args[RESIDUAL] + shift, args[OUT] + shift
    squares = v.splat(types.float32(0.0))
    for i in range(0, size, 16):
        step = i * 4 >> half
        x = load(half, residual + step)
        if args[DELTA] != 0:
            x = v.add(x, load(half, args[DELTA] + shift + step))
            store(half, residual + step, x)
            x = load(half, residual + step)
        squares = v.fused(x, x, squares)
    mean = v.total(squares) / types.float32(size) + v.float_of(args[EPS])
    factor = v.splat(types.float32(1.0) / v.root(mean))
    for i in range(0, size, 16):
        step = i * 4 >> half
        x = v.times(load(half, residual + step), factor)
        store(half, out + step, v.times(x, load(half, args[WEIGHT] + step)))


@cfunc(SIGNATURE, error_model="numpy", cache=True)
def add_rms_norm(args):
    counter = v.address_of(args)
    while True:
        first = v.next_index(counter) * CHUNK
        if first >= args[ROWS]:
            return
        for row in range(first, min(first + CHUNK, args[ROWS])):
            _normalise_row(args, row)


@cfunc(SIGNATURE, error_model="numpy", cache=True)
def swiglu(args):
    counter = v.address_of(args)
    half, size = args[HALF], args[SIZE]
    one, zero = v.splat(types.float32(1.0)), v.splat(types.float32(0.0))
    while True:
        first = v.next_index(counter) * CHUNK
        if first >= args[ROWS]:
            return
        for row in range(first, min(first + CHUNK, args[ROWS])):
            gate = args[GATE_UP] + (row * size * 8 >> half)
            up = gate + (size * 4 >> half)
            out = args[OUT] + (row * size * 4 >> half)
            for i in range(0, size, 16):
                step = i * 4 >> half
                z = load(half, gate + step)
                below = v.add(one, v.exponential(v.subtract(zero, z)))
                store(half, out + step, v.times(v.divide(z, below), load(half, up + step)))
