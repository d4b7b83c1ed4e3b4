"""Sixteen lanes at a time: the words that the processor kernels are written in.

Knows no operation. Addresses are int64 in bytes; a *word* is 32 bits: one float32, or two bfloat16
of which the first lies in the low half.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from engine.kernels.cpu import emit as e
from engine.kernels.cpu.emit import LANES


class VectorType(types.Type):
    """Sixteen float32."""

    def __init__(self) -> None:
        super().__init__(name="F32x16")


vector = VectorType()


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, e.F32)


@intrinsic
def load(context: Any, address: Any) -> Any:
    """16 float32"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.load(e.pointer(builder, args[0]), typ=e.F32, align=4)

    return vector(types.int64), generate


@intrinsic
def store(context: Any, address: Any, value: Any) -> Any:
    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        builder.store(args[1], e.pointer(builder, args[0]), align=4)

    return types.void(types.int64, vector), generate


@intrinsic
def load_half(context: Any, address: Any) -> Any:
    """16 bfloat16, widened"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        narrow = builder.load(e.pointer(builder, args[0]), typ=e.I16, align=2)
        wide = builder.shl(builder.zext(narrow, e.I32), e.every(e.I32, 16))
        return builder.bitcast(wide, e.F32)

    return vector(types.int64), generate


@intrinsic
def store_half(context: Any, address: Any, value: Any) -> Any:
    """16 bfloat16, rounded to the nearest, ties to even; what is not a number stays so. Where there
    is AVX-512 BF16, subnormal numbers become 0, as they do in its products."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        if e.has_pair_product():
            name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
            halves = e.call(builder, name, e.HALVES, args[1])
            builder.store(halves, e.pointer(builder, args[0]), align=2)
            return
        bits = builder.bitcast(args[1], e.I32)
        odd = builder.and_(builder.lshr(bits, e.every(e.I32, 16)), e.every(e.I32, 1))
        up = builder.add(bits, builder.add(odd, e.every(e.I32, 0x7FFF)))
        unordered = builder.fcmp_unordered("uno", args[1], args[1])
        kept = builder.select(unordered, e.every(e.I32, 0x7FC00000), up)
        narrow = builder.trunc(builder.lshr(kept, e.every(e.I32, 16)), e.I16)
        builder.store(narrow, e.pointer(builder, args[0]), align=2)

    return types.void(types.int64, vector), generate


@intrinsic
def splat(context: Any, value: Any) -> Any:
    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return e.splat(builder, args[0])

    return vector(types.float32), generate


def _binary(operation: str) -> Any:
    @intrinsic
    def apply(context: Any, a: Any, b: Any) -> Any:
        def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
            return getattr(builder, operation)(*args)

        return vector(vector, vector), generate

    return apply


add = _binary("fadd")
subtract = _binary("fsub")
times = _binary("fmul")
divide = _binary("fdiv")


@intrinsic
def fused(context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return e.fused(builder, *args)

    return vector(vector, vector, vector), generate


@intrinsic
def larger(context: Any, a: Any, b: Any) -> Any:
    """Lane by lane; b where a is not a number"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return vector(vector, vector), generate


@intrinsic
def if_larger(context: Any, a: Any, b: Any, yes: Any, no: Any) -> Any:
    """Lane by lane, `yes` where a > b"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", args[0], args[1]), args[2], args[3])

    return vector(vector, vector, vector, vector), generate


@intrinsic
def lanes(context: Any) -> Any:
    """0 to 15"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return ir.Constant(e.F32, [float(lane) for lane in range(LANES)])

    return vector(), generate


@intrinsic
def total(context: Any, value: Any) -> Any:
    """The sum of the lanes, by halves"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        left = args[0]
        for width in (8, 4, 2, 1):
            order = [(i + width) % LANES for i in range(LANES)]
            left = builder.fadd(left, builder.shuffle_vector(left, left, ir.Constant(e.I32, order)))
        return builder.extract_element(left, e.INT(0))

    return types.float32(vector), generate


@intrinsic
def largest(context: Any, value: Any) -> Any:
    """Return the largest of the lanes"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        left = args[0]
        for width in (8, 4, 2, 1):
            order = [(i + width) % LANES for i in range(LANES)]
            other = builder.shuffle_vector(left, left, ir.Constant(e.I32, order))
            left = builder.select(builder.fcmp_ordered(">", left, other), left, other)
        return builder.extract_element(left, e.INT(0))

    return types.float32(vector), generate


@intrinsic
def keep(context: Any, value: Any, first: Any, stop: Any, otherwise: Any) -> Any:
    """Lanes [first, stop) of `value`, `otherwise` in the others"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        lanes = ir.Constant(e.I32, list(range(LANES)))
        low = e.splat(builder, builder.trunc(args[1], e.INT))
        high = e.splat(builder, builder.trunc(args[2], e.INT))
        inside = builder.and_(
            builder.icmp_signed(">=", lanes, low), builder.icmp_signed("<", lanes, high)
        )
        return builder.select(inside, args[0], e.splat(builder, args[3]))

    return vector(vector, types.int64, types.int64, types.float32), generate


@intrinsic
def where(context: Any, bits: Any, value: Any) -> Any:
    """Lanes of `value` whose bit is set, from the lowest on; -inf in the others"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        kind = ir.VectorType(ir.IntType(1), LANES)
        chosen = builder.bitcast(builder.trunc(args[0], e.SHORT), kind)
        return builder.select(chosen, args[1], e.every(e.F32, float("-inf")))

    return vector(types.int64, vector), generate


LOG2_E = 1.44269504088896341
LN_2_HIGH, LN_2_LOW = 0.693359375, -2.12194440e-4
EXP_COEFFICIENTS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
"""The coefficients of (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2, highest power first (Cephes,
expf)."""


@intrinsic
def exponential(context: Any, value: Any) -> Any:
    """e^value to 2 units in the last place; 0 below -87, as of -inf; inf above 88.8"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        # Comparisons are false of what is not a number, so that it stays what it is.
        x, low, high = args[0], e.every(e.F32, -88.0), e.every(e.F32, 89.0)
        tiny = builder.fcmp_ordered("<", x, e.every(e.F32, -87.0))
        safe = builder.select(builder.fcmp_ordered(">", low, x), low, x)
        safe = builder.select(builder.fcmp_ordered("<", high, safe), high, safe)
        power = e.call(
            builder, "llvm.rint.v16f32", e.F32, builder.fmul(safe, e.every(e.F32, LOG2_E))
        )
        rest = e.fused(builder, power, e.every(e.F32, -LN_2_HIGH), safe)
        rest = e.fused(builder, power, e.every(e.F32, -LN_2_LOW), rest)
        curve = e.every(e.F32, EXP_COEFFICIENTS[0])
        for coefficient in EXP_COEFFICIENTS[1:]:
            curve = e.fused(builder, curve, rest, e.every(e.F32, coefficient))
        curve = e.fused(builder, builder.fmul(curve, rest), rest, rest)
        curve = builder.fadd(curve, e.every(e.F32, 1.0))
        result = e.scaled(builder, curve, power)
        return builder.select(tiny, e.every(e.F32, 0.0), result)

    return vector(vector), generate


def _typed(kind: Any, ir_kind: Any, align: int) -> Any:
    """A load and a store of one number."""

    @intrinsic
    def read(context: Any, address: Any) -> Any:
        def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
            return builder.load(e.pointer(builder, args[0]), typ=ir_kind, align=align)

        return kind(types.int64), generate

    @intrinsic
    def write(context: Any, address: Any, value: Any) -> Any:
        def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
            builder.store(args[1], e.pointer(builder, args[0]), align=align)

        return types.void(types.int64, kind), generate

    return read, write


read_word, write_word = _typed(types.uint32, e.INT, 2)
read_short, write_short = _typed(types.uint16, e.SHORT, 2)
read_long, write_long = _typed(types.int64, e.LONG, 8)
read_float, write_float = _typed(types.float32, e.FLOAT, 4)


@intrinsic
def next_index(context: Any, address: Any) -> Any:
    """The counter at `address` before it is raised by one: each thread gets other numbers."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", e.pointer(builder, args[0]), e.LONG(1), "monotonic")

    return types.int64(types.int64), generate


@intrinsic
def address_of(context: Any, pointer: Any) -> Any:
    """Return the address of what a pointer to int64 points at"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.ptrtoint(args[0], e.LONG)

    return types.int64(types.CPointer(types.int64)), generate


@intrinsic
def pointer_to(context: Any, address: Any) -> Any:
    """int64 numbers at an address"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], e.LONG.as_pointer())

    return types.CPointer(types.int64)(types.int64), generate


@intrinsic
def float_of(context: Any, bits: Any) -> Any:
    """The float32 whose bits are the low half of an int64"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.bitcast(builder.trunc(args[0], e.INT), e.FLOAT)

    return types.float32(types.int64), generate


@intrinsic
def root(context: Any, value: Any) -> Any:
    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return e.call(builder, "llvm.sqrt.f32", e.FLOAT, args[0])

    return types.float32(types.float32), generate


@intrinsic
def prefetch(context: Any, address: Any) -> Any:
    """Ask for the cache line at an address"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        e.prefetch(builder, args[0])

    return types.void(types.int64), generate


@intrinsic
def call(context: Any, function: Any, argument: Any) -> Any:
    """A function of one address, by its own"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [e.LONG])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])

    return types.void(types.int64, types.int64), generate


@intrinsic
def wait(context: Any, function: Any) -> Any:
    """Call a function of nothing, by its address"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [])

    return types.void(types.int64), generate


PRODUCT_ARGUMENTS = 11


@intrinsic
def library_product(
    context: Any,
    function: Any,
    rows: Any,
    columns: Any,
    depth: Any,
    a_stride: Any,
    b_stride: Any,
    c_stride: Any,
    adds: Any,
    a: Any,
    b: Any,
    c: Any,
    in_pairs: Any,
) -> Any:
    """Call `choice.microkernel.PRODUCT` by its address; strides are numbers, not bytes"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        # Flags are passed as whole words, of which a callee reads the lowest byte (System V ABI).
        kind = ir.FunctionType(ir.VoidType(), [e.LONG] * PRODUCT_ARGUMENTS)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), list(args[1:]))

    return types.void(*[types.int64] * (1 + PRODUCT_ARGUMENTS)), generate
