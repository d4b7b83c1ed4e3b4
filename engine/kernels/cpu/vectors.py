"""Sixteen lanes at a time: the words that the processor kernels are written in.

Above: the kernels beside it. Below: numba and LLVM, which lowers 16 lanes to what the machine has.
Knows no operation. Addresses are int64 in bytes; a *word* is 32 bits: one float32, or two bfloat16
of which the first lies in the low half.

The heart is `multiply_*`: C[rows, 32] += A[rows, steps] B[steps, 32] in registers, where a step is
a word of each row of A against two vectors of B. On bfloat16 a step is two products and their sum
(VDPBF16PS where there is AVX-512 BF16; elsewhere widened by a shift). Every row of C is summed in
the order of the steps, whatever the other rows: results do not depend on the batch.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16
MAX_ROWS = 12
"""Rows of a tile: 24 accumulators of the 32 registers of AVX-512."""
COLUMNS = 2 * LANES

_FLOAT = ir.FloatType()
_INT = ir.IntType(32)
_SHORT = ir.IntType(16)
_LONG = ir.IntType(64)
_F32 = ir.VectorType(_FLOAT, LANES)
_I32 = ir.VectorType(_INT, LANES)
_I16 = ir.VectorType(_SHORT, LANES)


class _Half(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Half)

    def __hash__(self) -> int:
        return hash(_Half)


_PAIRS = ir.VectorType(_Half(), 2 * LANES)


def _has_pair_product() -> bool:
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512bf16"))


class VectorType(types.Type):
    """Sixteen float32."""

    def __init__(self) -> None:
        super().__init__(name="F32x16")


vector = VectorType()


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _F32)


def _pointer(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.inttoptr(address, ir.PointerType())


def _splat(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    kind = ir.VectorType(value.type, LANES)
    single = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _INT(0))
    return builder.shuffle_vector(single, single, ir.Constant(_I32, [0] * LANES))


def _all(kind: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(kind, [kind.element(value)] * LANES)


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, *values: ir.Value) -> ir.Value:
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def _fused(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return _call(builder, "llvm.fma.v16f32", _F32, a, b, c)


@intrinsic
def load(context: Any, address: Any) -> Any:
    """16 float32"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.load(_pointer(builder, args[0]), typ=_F32, align=4)

    return vector(types.int64), generate


@intrinsic
def store(context: Any, address: Any, value: Any) -> Any:
    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        builder.store(args[1], _pointer(builder, args[0]), align=4)

    return types.void(types.int64, vector), generate


@intrinsic
def load_half(context: Any, address: Any) -> Any:
    """16 bfloat16, widened"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        narrow = builder.load(_pointer(builder, args[0]), typ=_I16, align=2)
        wide = builder.shl(builder.zext(narrow, _I32), _all(_I32, 16))
        return builder.bitcast(wide, _F32)

    return vector(types.int64), generate


@intrinsic
def store_half(context: Any, address: Any, value: Any) -> Any:
    """16 bfloat16, rounded to the nearest, ties to even; what is not a number stays so"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        bits = builder.bitcast(args[1], _I32)
        odd = builder.and_(builder.lshr(bits, _all(_I32, 16)), _all(_I32, 1))
        up = builder.add(bits, builder.add(odd, _all(_I32, 0x7FFF)))
        unordered = builder.fcmp_unordered("uno", args[1], args[1])
        kept = builder.select(unordered, _all(_I32, 0x7FC00000), up)
        narrow = builder.trunc(builder.lshr(kept, _all(_I32, 16)), _I16)
        builder.store(narrow, _pointer(builder, args[0]), align=2)

    return types.void(types.int64, vector), generate


@intrinsic
def splat(context: Any, value: Any) -> Any:
    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return _splat(builder, args[0])

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
        return _fused(builder, *args)

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
        return ir.Constant(_F32, [float(lane) for lane in range(LANES)])

    return vector(), generate


@intrinsic
def total(context: Any, value: Any) -> Any:
    """The sum of the lanes, by halves"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        left = args[0]
        for width in (8, 4, 2, 1):
            order = [(i + width) % LANES for i in range(LANES)]
            left = builder.fadd(left, builder.shuffle_vector(left, left, ir.Constant(_I32, order)))
        return builder.extract_element(left, _INT(0))

    return types.float32(vector), generate


@intrinsic
def largest(context: Any, value: Any) -> Any:
    """Of the lanes"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        left = args[0]
        for width in (8, 4, 2, 1):
            order = [(i + width) % LANES for i in range(LANES)]
            other = builder.shuffle_vector(left, left, ir.Constant(_I32, order))
            left = builder.select(builder.fcmp_ordered(">", left, other), left, other)
        return builder.extract_element(left, _INT(0))

    return types.float32(vector), generate


@intrinsic
def keep(context: Any, value: Any, first: Any, stop: Any, otherwise: Any) -> Any:
    """Lanes [first, stop) of `value`, `otherwise` in the others"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        lanes = ir.Constant(_I32, list(range(LANES)))
        low = _splat(builder, builder.trunc(args[1], _INT))
        high = _splat(builder, builder.trunc(args[2], _INT))
        inside = builder.and_(
            builder.icmp_signed(">=", lanes, low), builder.icmp_signed("<", lanes, high)
        )
        return builder.select(inside, args[0], _splat(builder, args[3]))

    return vector(vector, types.int64, types.int64, types.float32), generate


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
"""Of (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2, highest power first (Cephes, expf)."""


@intrinsic
def exponential(context: Any, value: Any) -> Any:
    """e^value to 2 units in the last place; 0 below -87, as of -inf; inf above 88"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        x = args[0]
        tiny = builder.fcmp_ordered("<", x, _all(_F32, -87.0))
        huge = builder.fcmp_ordered(">", x, _all(_F32, 88.0))
        outside = builder.or_(tiny, huge)
        safe = builder.select(outside, _all(_F32, 0.0), x)
        scaled = builder.fmul(safe, _all(_F32, LOG2_E))
        power = _call(builder, "llvm.rint.v16f32", _F32, scaled)
        rest = _fused(builder, power, _all(_F32, -LN_2_HIGH), safe)
        rest = _fused(builder, power, _all(_F32, -LN_2_LOW), rest)
        curve = _all(_F32, EXP_COEFFICIENTS[0])
        for coefficient in EXP_COEFFICIENTS[1:]:
            curve = _fused(builder, curve, rest, _all(_F32, coefficient))
        curve = _fused(builder, builder.fmul(curve, rest), rest, rest)
        curve = builder.fadd(curve, _all(_F32, 1.0))
        # What is not a number converts to anything and stays one through `curve`.
        exponent = builder.add(builder.fptosi(power, _I32), _all(_I32, 127))
        result = builder.fmul(curve, builder.bitcast(builder.shl(exponent, _all(_I32, 23)), _F32))
        result = builder.select(huge, _all(_F32, float("inf")), result)
        return builder.select(tiny, _all(_F32, 0.0), result)

    return vector(vector), generate


def _typed(kind: Any, ir_kind: Any, align: int) -> Any:
    """A load and a store of one number."""

    @intrinsic
    def read(context: Any, address: Any) -> Any:
        def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
            return builder.load(_pointer(builder, args[0]), typ=ir_kind, align=align)

        return kind(types.int64), generate

    @intrinsic
    def write(context: Any, address: Any, value: Any) -> Any:
        def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
            builder.store(args[1], _pointer(builder, args[0]), align=align)

        return types.void(types.int64, kind), generate

    return read, write


read_word, write_word = _typed(types.uint32, _INT, 2)
read_short, write_short = _typed(types.uint16, _SHORT, 2)
read_long, write_long = _typed(types.int64, _LONG, 8)
read_float, write_float = _typed(types.float32, _FLOAT, 4)


@intrinsic
def next_index(context: Any, address: Any) -> Any:
    """The counter at `address` before it is raised by one: each thread gets other numbers."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args[0]), _LONG(1), "monotonic")

    return types.int64(types.int64), generate


@intrinsic
def address_of(context: Any, pointer: Any) -> Any:
    """Of what a pointer to int64 points at"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.ptrtoint(args[0], _LONG)

    return types.int64(types.CPointer(types.int64)), generate


@intrinsic
def pointer_to(context: Any, address: Any) -> Any:
    """int64 numbers at an address"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], _LONG.as_pointer())

    return types.CPointer(types.int64)(types.int64), generate


@intrinsic
def float_of(context: Any, bits: Any) -> Any:
    """The float32 whose bits are the low half of an int64"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.bitcast(builder.trunc(args[0], _INT), _FLOAT)

    return types.float32(types.int64), generate


@intrinsic
def root(context: Any, value: Any) -> Any:
    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return _call(builder, "llvm.sqrt.f32", _FLOAT, args[0])

    return types.float32(types.float32), generate


@intrinsic
def prefetch(context: Any, address: Any) -> Any:
    """Ask for the cache line at an address, into the core's second cache"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        place = _pointer(builder, args[0])
        kind = ir.FunctionType(ir.VoidType(), [place.type, _INT, _INT, _INT])
        name = "llvm.prefetch.p0"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        builder.call(function, [place, _INT(0), _INT(2), _INT(1)])

    return types.void(types.int64), generate


@intrinsic
def call(context: Any, function: Any, argument: Any) -> Any:
    """A function of one address, by its own"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_LONG])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])

    return types.void(types.int64, types.int64), generate


@intrinsic
def wait(context: Any, function: Any) -> Any:
    """Call a function of nothing, by its address"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [])

    return types.void(types.int64), generate


@intrinsic
def tile_memory(context: Any) -> Any:
    """The address of a tile C of float32 [MAX_ROWS, COLUMNS] in the caller's own frame"""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        kind = ir.ArrayType(_FLOAT, MAX_ROWS * COLUMNS)
        return builder.ptrtoint(cgutils.alloca_once(builder, kind), _LONG)

    return types.int64(), generate


def _words(builder: ir.IRBuilder, acc: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """float32 words"""
    return _fused(builder, builder.bitcast(a, _F32), builder.bitcast(b, _F32), acc)


def _pairs(builder: ir.IRBuilder, acc: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """Two bfloat16 a word"""
    if _has_pair_product():
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        return _call(
            builder, name, _F32, acc, builder.bitcast(a, _PAIRS), builder.bitcast(b, _PAIRS)
        )
    for half in ("low", "high"):
        a_half, b_half = (
            builder.shl(x, _all(_I32, 16)) if half == "low" else builder.and_(x, _all(_I32, -65536))
            for x in (a, b)
        )
        acc = _words(builder, acc, a_half, b_half)
    return acc


def _tile(rows: int, step_product: Any) -> Any:
    @intrinsic
    def tile(
        context: Any,
        a: Any,
        stride: Any,
        b0: Any,
        b1: Any,
        b_stride: Any,
        steps: Any,
        c: Any,
        c_stride: Any,
    ) -> Any:
        def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
            a, stride, b0, b1, b_stride, steps, c, c_stride = args
            return _tile_loop(
                builder, rows, step_product, (a, stride), (b0, b1, b_stride), steps, (c, c_stride)
            )

        return types.void(*[types.int64] * 8), generate

    return tile


def _tile_loop(
    builder: ir.IRBuilder,
    rows: int,
    step_product: Any,
    a: tuple[ir.Value, ir.Value],
    b: tuple[ir.Value, ir.Value, ir.Value],
    steps: ir.Value,
    c: tuple[ir.Value, ir.Value],
) -> None:
    """steps > 0. Accumulators live in registers from the first step to the last."""
    places = [
        builder.add(builder.add(c[0], builder.mul(c[1], _LONG(row))), _LONG(64 * half))
        for row in range(rows)
        for half in range(2)
    ]
    started = [builder.load(_pointer(builder, at), typ=_F32, align=4) for at in places]
    row_starts = [builder.add(a[0], builder.mul(a[1], _LONG(row))) for row in range(rows)]
    before = builder.basic_block
    loop = builder.append_basic_block("steps")
    after = builder.append_basic_block("stepped")
    builder.branch(loop)
    builder.position_at_end(loop)
    step = builder.phi(_LONG)
    step.add_incoming(_LONG(0), before)
    sums = [builder.phi(_F32) for _ in places]
    for phi, value in zip(sums, started, strict=True):
        phi.add_incoming(value, before)
    down = builder.mul(step, b[2])
    columns = [
        builder.load(_pointer(builder, builder.add(start, down)), typ=_I32, align=4)
        for start in b[:2]
    ]
    grown = []
    for row, start in enumerate(row_starts):
        at = builder.add(start, builder.shl(step, _LONG(2)))
        word = _splat(builder, builder.load(_pointer(builder, at), typ=_INT, align=2))
        grown += [
            step_product(builder, sums[2 * row + half], word, columns[half]) for half in range(2)
        ]
    following = builder.add(step, _LONG(1))
    step.add_incoming(following, loop)
    for phi, value in zip(sums, grown, strict=True):
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, steps), loop, after)
    builder.position_at_end(after)
    for at, value in zip(places, grown, strict=True):
        builder.store(value, _pointer(builder, at), align=4)


words_1, words_2, words_3, words_4, words_6, words_8, words_12 = (
    _tile(rows, _words) for rows in (1, 2, 3, 4, 6, 8, 12)
)
pairs_1, pairs_2, pairs_3, pairs_4, pairs_6, pairs_8, pairs_12 = (
    _tile(rows, _pairs) for rows in (1, 2, 3, 4, 6, 8, 12)
)
