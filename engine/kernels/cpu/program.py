"""Kernels one after the other on one team of threads, called once.

Every thread calls each kernel, in order, with its row of a table of arguments, and waits for the
others before the next.
"""

from __future__ import annotations

from numba import cfunc, types

from engine.kernels.cpu import vectors as v

SIGNATURE = types.void(types.CPointer(types.int64))

KERNELS, TABLE, WIDTH, COUNT, BARRIER = range(5)
"""Arguments, all int64: addresses of KERNELS int64 [COUNT] and TABLE int64 [COUNT, WIDTH], and of a
function that returns when all threads have called it."""


@cfunc(SIGNATURE, error_model="numpy", cache=True)
def run_program(args):
    for index in range(args[COUNT]):
        row = args[TABLE] + index * args[WIDTH] * 8
        v.call(v.read_long(args[KERNELS] + index * 8), row)
        v.wait(args[BARRIER])
