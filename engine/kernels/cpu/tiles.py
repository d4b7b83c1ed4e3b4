"""C[rows, 32] += A[rows, steps] B[steps, 32] in registers, the heart of every product.

A step is a word of each row of A against two vectors of B. On bfloat16 a step is two products and
their sum (VDPBF16PS where there is AVX-512 BF16; elsewhere widened by a shift). `bytes_*` is the
same with B in int8, which is widened once for all rows. Every row of C is summed in the order of
the steps, whatever the other rows: results do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.cpu import emit as e
from engine.kernels.cpu.emit import LANES

MAX_ROWS = 12
"""Rows of a tile: 24 accumulators of the 32 registers of AVX-512."""
BLOCK_ROWS = 96
"""Rows of x that stay in the cache while panels pass."""
COLUMNS = 2 * LANES
ROWS, PROMPT_ROWS = (12, 8, 6, 4, 3, 2, 1), (12, 4, 1)
"""The rows of tiles that there is code for: of any product, and of one over a prompt, which has
few other tiles than the largest. Each takes part of a second to compile."""
NUM_ARGUMENTS = 9
AHEAD = 8192
"""Bytes of B asked for before they are needed, where no other rows are multiplied meanwhile: what
the processor fetches by itself comes too late. Measured on one core with B in memory, of 8 to 32
rows of A: 1.3-1.5 times as fast."""
Columns = Callable[[ir.IRBuilder, ir.Value], list[ir.Value]]
"""Loads the two vectors of B of a step."""


@intrinsic
def tile_memory(context: Any) -> Any:
    """The address of a tile C of float32 [MAX_ROWS, COLUMNS] in the caller's own frame"""
    return types.int64(), _frame_memory(MAX_ROWS)


@intrinsic
def block_memory(context: Any) -> Any:
    """Alike, of float32 [BLOCK_ROWS, COLUMNS]"""
    return types.int64(), _frame_memory(BLOCK_ROWS)


def _frame_memory(rows: int) -> Any:
    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        kind = ir.ArrayType(e.FLOAT, rows * COLUMNS)
        return builder.ptrtoint(cgutils.alloca_once(builder, kind), e.LONG)

    return generate


def _halves(builder: ir.IRBuilder, word: ir.Value) -> list[ir.Value]:
    """A word's two bfloat16, widened"""
    low = builder.shl(word, e.every(e.I32, 16))
    high = builder.and_(word, e.every(e.I32, -65536))
    return [builder.bitcast(x, e.F32) for x in (low, high)]


def _whole(builder: ir.IRBuilder, word: ir.Value) -> list[ir.Value]:
    """A word's one float32"""
    return [builder.bitcast(word, e.F32)]


def words(builder: ir.IRBuilder, acc: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """float32 words"""
    return e.fused(builder, builder.bitcast(a, e.F32), builder.bitcast(b, e.F32), acc)


def pairs(builder: ir.IRBuilder, acc: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """Two bfloat16 a word"""
    if e.has_pair_product():
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        return e.call(
            builder, name, e.F32, acc, builder.bitcast(a, e.PAIRS), builder.bitcast(b, e.PAIRS)
        )
    for a_half, b_half in zip(_halves(builder, a), _halves(builder, b), strict=True):
        acc = e.fused(builder, a_half, b_half, acc)
    return acc


def emit_product(
    module: ir.Module, name: str, step_product: Any, layout: Layout, counts: Sequence[int]
) -> None:
    """Define a function of C += A B for any number of rows, as many at once as `counts` has, the
    largest first, down to 1. Arguments are int64: rows, a, its stride, three of B's layout, steps,
    c, its stride."""
    kind = ir.FunctionType(ir.VoidType(), [e.LONG] * NUM_ARGUMENTS)
    function = cgutils.get_or_insert_function(module, kind, name)
    function.linkage = "weak_odr"  # kept though nothing beside it calls it
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    rows, a, stride, b, b_place, b_stride, steps, c, c_stride = function.args
    columns = layout(b, b_place, b_stride, c_stride)

    def tile(count: int, a: ir.Value, c: ir.Value) -> None:
        _tile_loop(builder, count, step_product, (a, stride), columns, steps, (c, c_stride))

    _in_tiles(builder, counts, rows, (a, stride), (c, c_stride), tile)
    builder.ret_void()


Layout = Callable[[ir.Value, ir.Value, ir.Value, ir.Value], Columns]
"""Says where B lies, by three arguments of the product and C's stride."""


def two_halves(b0: ir.Value, b1: ir.Value, stride: ir.Value, _: ir.Value) -> Columns:
    """A row of B has two halves, at b0 and b1, `stride` apart from those of the next row."""

    def columns(builder: ir.IRBuilder, step: ir.Value) -> list[ir.Value]:
        down = builder.mul(step, stride)
        return [_vector(builder, builder.add(half, down)) for half in (b0, b1)]

    return columns


def one_stretch(b: ir.Value, ahead: ir.Value, pace: ir.Value, _: ir.Value) -> Columns:
    """B lies in one stretch of memory. With each step `pace` bytes more from `ahead` on are asked
    for, at most two lines: what is needed next comes while this is multiplied."""

    def columns(builder: ir.IRBuilder, step: ir.Value) -> list[ir.Value]:
        wanted = builder.add(ahead, builder.mul(step, pace))
        for line in (0, 64):
            e.prefetch(builder, builder.add(wanted, e.LONG(line)))
        row = builder.add(b, builder.mul(step, e.LONG(4 * COLUMNS)))
        return [_vector(builder, builder.add(row, e.LONG(half))) for half in (0, 64)]

    return columns


def in_blocks(shift: int) -> Layout:
    """2^shift rows of B lie in a block, of which a table has the numbers. Arguments: the first
    block, the table and the size of a block; rows are as far apart as those of C."""

    def layout(b: ir.Value, table: ir.Value, size: ir.Value, stride: ir.Value) -> Columns:
        def columns(builder: ir.IRBuilder, step: ir.Value) -> list[ir.Value]:
            entry = builder.shl(builder.lshr(step, e.LONG(shift)), e.LONG(3))
            place = e.pointer(builder, builder.add(table, entry))
            block = builder.mul(builder.load(place, typ=e.LONG, align=8), size)
            down = builder.mul(builder.and_(step, e.LONG((1 << shift) - 1)), stride)
            row = builder.add(b, builder.add(block, down))
            return [_vector(builder, builder.add(row, e.LONG(half))) for half in (0, 64)]

        return columns

    return layout


def _vector(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.load(e.pointer(builder, address), typ=e.I32, align=4)


def _in_tiles(
    builder: ir.IRBuilder,
    counts: Sequence[int],
    rows: ir.Value,
    a: tuple[ir.Value, ir.Value],
    c: tuple[ir.Value, ir.Value],
    tile: Callable[[int, ir.Value, ir.Value], None],
) -> None:
    """Compute `rows` rows by `tile(count, a, c)`."""
    left, at_a, at_c = (cgutils.alloca_once_value(builder, x) for x in (rows, a[0], c[0]))
    for count in counts:
        wanted, body, done = (
            builder.append_basic_block(f"{name}_{count}") for name in ("wanted", "body", "done")
        )
        builder.branch(wanted)
        builder.position_at_end(wanted)
        enough = builder.icmp_signed(">=", builder.load(left), e.LONG(count))
        builder.cbranch(enough, body, done)
        builder.position_at_end(body)
        tile(count, builder.load(at_a), builder.load(at_c))
        builder.store(builder.sub(builder.load(left), e.LONG(count)), left)
        for at, (_, stride) in ((at_a, a), (at_c, c)):
            further = builder.mul(stride, e.LONG(count))
            builder.store(builder.add(builder.load(at), further), at)
        builder.branch(wanted)
        builder.position_at_end(done)


def _ask_ahead(
    builder: ir.IRBuilder, b: ir.Value, following: ir.Value, down: ir.Value, size: ir.Value
) -> None:
    """Reading `size` bytes from `b` on has come `down`: ask for the line AHEAD of that, which may
    be one of `following`."""
    behind = builder.sub(builder.add(down, e.LONG(AHEAD)), size)
    inside = builder.icmp_signed("<", behind, e.LONG(0))
    end = builder.add(b, size)
    e.prefetch(builder, builder.add(builder.select(inside, end, following), behind))


def _loop(
    builder: ir.IRBuilder,
    steps: ir.Value,
    started: list[ir.Value],
    body: Callable[[ir.Value, list[ir.Value]], list[ir.Value]],
) -> list[ir.Value]:
    """Return what `body(step, sums)` makes of sums that begin as `started`, for steps from 0 on, at
    least one. They live in registers from the first step to the last.
    """
    before = builder.basic_block
    loop = builder.append_basic_block("steps")
    after = builder.append_basic_block("stepped")
    builder.branch(loop)
    builder.position_at_end(loop)
    step = builder.phi(e.LONG)
    step.add_incoming(e.LONG(0), before)
    sums = [builder.phi(e.F32) for _ in started]
    for phi, value in zip(sums, started, strict=True):
        phi.add_incoming(value, before)
    grown = body(step, sums)
    following = builder.add(step, e.LONG(1))
    step.add_incoming(following, loop)
    for phi, value in zip(sums, grown, strict=True):
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, steps), loop, after)
    builder.position_at_end(after)
    return grown


def _row_starts(
    builder: ir.IRBuilder, rows: int, matrix: tuple[ir.Value, ir.Value]
) -> list[ir.Value]:
    """matrix: address and stride."""
    start, stride = matrix
    return [builder.add(start, builder.mul(stride, e.LONG(row))) for row in range(rows)]


def _word(builder: ir.IRBuilder, row_start: ir.Value, step: ir.Value) -> ir.Value:
    """Load one word of a row of A into all lanes"""
    at = builder.add(row_start, builder.shl(step, e.LONG(2)))
    return e.splat(builder, builder.load(e.pointer(builder, at), typ=e.INT, align=2))


def _tile_loop(
    builder: ir.IRBuilder,
    rows: int,
    step_product: Any,
    a: tuple[ir.Value, ir.Value],
    columns_of: Columns,
    steps: ir.Value,
    c: tuple[ir.Value, ir.Value],
) -> None:
    """C[rows, 32] += A B. Steps > 0."""
    places = [
        builder.add(start, e.LONG(64 * half))
        for start in _row_starts(builder, rows, c)
        for half in range(2)
    ]
    started = [builder.load(e.pointer(builder, at), typ=e.F32, align=4) for at in places]
    row_starts = _row_starts(builder, rows, a)

    def body(step: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        columns = columns_of(builder, step)
        grown = []
        for row, start in enumerate(row_starts):
            word = _word(builder, start, step)
            grown += [
                step_product(builder, sums[2 * row + half], word, columns[half])
                for half in range(2)
            ]
        return grown

    for at, value in zip(places, _loop(builder, steps, started, body), strict=True):
        builder.store(value, e.pointer(builder, at), align=4)


def _bytes_tile(rows: int, numbers_of: Any, each: int) -> Any:
    """numbers_of: makes a word of A the `each` numbers it holds."""

    @intrinsic
    def tile(
        context: Any, a: Any, stride: Any, b: Any, following: Any, steps: Any, c: Any, c_stride: Any
    ) -> Any:
        def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
            a, stride, b, following, steps, c, c_stride = args
            kind = (rows, numbers_of, each)
            return _bytes_loop(builder, kind, (a, stride), (b, following), steps, (c, c_stride))

        return types.void(*[types.int64] * 7), generate

    return tile


def _bytes_loop(
    builder: ir.IRBuilder,
    kind: tuple[int, Any, int],
    a: tuple[ir.Value, ir.Value],
    b: tuple[ir.Value, ir.Value],
    steps: ir.Value,
    c: tuple[ir.Value, ir.Value],
) -> None:
    """C[rows, 32] = A B; a step is 32 bytes of B for each number of a word. b: it, and what is read
    next. Steps > 0."""
    rows, numbers_of, each = kind
    row_starts = _row_starts(builder, rows, a)

    def body(step: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        down = builder.mul(step, e.LONG(COLUMNS * each))
        place = builder.add(b[0], down)
        _ask_ahead(builder, *b, down, builder.mul(steps, e.LONG(COLUMNS * each)))
        columns = []
        for part in range(2 * each):
            at = e.pointer(builder, builder.add(place, e.LONG(LANES * part)))
            narrow = builder.load(at, typ=e.I8, align=LANES)
            columns.append(builder.sitofp(builder.sext(narrow, e.I32), e.F32))
        grown = []
        for row, start in enumerate(row_starts):
            for number, x in enumerate(numbers_of(builder, _word(builder, start, step))):
                for half in range(2):
                    so_far = sums[(row * each + number) * 2 + half]
                    grown.append(e.fused(builder, x, columns[2 * number + half], so_far))
        return grown

    # A sum for every number of a word: what waits for one another is shorter.
    started = [e.every(e.F32, 0.0)] * (rows * 2 * each)
    grown = _loop(builder, steps, started, body)
    for row, start in enumerate(_row_starts(builder, rows, c)):
        for half in range(2):
            parts = [grown[(row * each + number) * 2 + half] for number in range(each)]
            value = parts[0] if each == 1 else builder.fadd(*parts)
            at = builder.add(start, e.LONG(64 * half))
            builder.store(value, e.pointer(builder, at), align=4)


BYTES_ROWS = (4, 3, 2, 1)
BYTES_OF_WORDS = tuple(_bytes_tile(rows, _whole, 1) for rows in BYTES_ROWS)
BYTES_OF_PAIRS = tuple(_bytes_tile(rows, _halves, 2) for rows in BYTES_ROWS)
"""As WORDS and PAIRS with B in int8; C is overwritten."""
