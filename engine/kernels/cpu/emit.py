"""Emits what the kernels' words become: types and instructions of LLVM.

A vector has LANES lanes of 32 bits, which LLVM lowers to what the machine has.
"""

from __future__ import annotations

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils

LANES = 16

FLOAT = ir.FloatType()
INT = ir.IntType(32)
SHORT = ir.IntType(16)
LONG = ir.IntType(64)
F32 = ir.VectorType(FLOAT, LANES)
I32 = ir.VectorType(INT, LANES)
I16 = ir.VectorType(SHORT, LANES)
I8 = ir.VectorType(ir.IntType(8), LANES)


class _Half(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Half)

    def __hash__(self) -> int:
        return hash(_Half)


PAIRS = ir.VectorType(_Half(), 2 * LANES)
HALVES = ir.VectorType(_Half(), LANES)


def has_feature(name: str) -> bool:
    """Return whether this processor has what LLVM names so."""
    return bool(llvmlite.binding.get_host_cpu_features().get(name))


def has_pair_product() -> bool:
    return has_feature("avx512bf16")


def pointer(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.inttoptr(address, ir.PointerType())


def splat(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    kind = ir.VectorType(value.type, LANES)
    single = builder.insert_element(ir.Constant(kind, ir.Undefined), value, INT(0))
    return builder.shuffle_vector(single, single, ir.Constant(I32, [0] * LANES))


def every(kind: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(kind, [kind.element(value)] * LANES)


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *values: ir.Value) -> ir.Value:
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def fused(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return call(builder, "llvm.fma.v16f32", F32, a, b, c)


def scaled(builder: ir.IRBuilder, value: ir.Value, power: ir.Value) -> ir.Value:
    """Return value * 2^power; power: whole numbers from -126 to 128, the last of which may make it
    infinite."""
    if has_feature("avx512f"):
        name, as_set = "llvm.x86.avx512.mask.scalef.ps.512", INT(4)
        return call(builder, name, F32, value, power, value, SHORT(-1), as_set)
    # What is not a number converts to anything and stays one through `value`.
    exponent = builder.add(builder.fptosi(power, I32), every(I32, 127))
    return builder.fmul(value, builder.bitcast(builder.shl(exponent, every(I32, 23)), F32))


def prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Ask for the cache line at an address, to be read, into the core's first cache."""
    place = pointer(builder, address)
    call(builder, "llvm.prefetch.p0", ir.VoidType(), place, INT(0), INT(3), INT(1))
