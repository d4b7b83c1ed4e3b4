"""Causal attention straight from the paged cache, and how keys and values get there.

    out[m] = sum_j p[m, j] V[j] / sum_j p[m, j],  p[m, j] = exp(scale (q[m] K[j] - max_j q[m] K[j]))

Nothing is gathered: products read blocks where they lie, so the layout is made for them. For a
block and head, with P numbers in a word:

    keys     [head_dim / P, 16] words: step d of a product meets the 16 keys side by side
    values   [16 / P, head_dim] words: step j meets the channels, of two keys at once where P is 2

A thread draws items, each of up to 12 rows that share their keys, or 32 where a library multiplies:
the query heads of a group for one decoded token, or tokens of a prompt for one head. It computes
all scores of the item, then their softmax in float32, then the mix: two passes and no rescaling, so
a row's result depends neither on its neighbours nor on how a prompt was cut. What lies behind a
sequence's end is never multiplied: 0 * NaN is NaN.
"""

from __future__ import annotations

from numba import cfunc, njit, types

from engine.kernels.cpu import vectors as v
from engine.kernels.cpu.items import (
    BLOCK,
    HEAD,
    ITEM_WIDTH,
    LIBRARY_ROWS,
    NUM_ROWS,
    SEQ,
    TOKEN,
    VALID,
    VALID_STEP,
)
from engine.kernels.cpu.products import (
    hold_multiply,
    hold_multiply_paged,
    multiply,
    multiply_paged,
    store,
)
from engine.kernels.cpu.tiles import MAX_ROWS, tile_memory

SIGNATURE = types.void(types.CPointer(types.int64))
AHEAD = 4
"""Blocks asked for before they are needed."""

(
    COUNTER,
    Q,
    Q_STRIDE,
    OUT,
    OUT_STRIDE,
    K,
    V,
    SLOT,
    TABLES,
    TABLE_WIDTH,
    ITEMS,
    NUM_ITEMS,
    SCRATCH,
    SCRATCH_BYTES,
    SCORE_STRIDE,
    KV_HEADS,
    GROUP,
    HEAD_DIM,
    WINDOW,
    HALF,
    SCALE,
    PRODUCT,
    RELEASE,
) = range(23)
"""Arguments of `attend`, all int64; strides and sizes are bytes, tables int64 [S, TABLE_WIDTH],
WINDOW 0 for none, SCALE the bits of a float32. SLOT counts the threads that took scratch. PRODUCT
and RELEASE are a `Microkernel` that multiplies for tokens of a prompt; 0: our own tiles do."""


@njit(error_model="numpy")
def _block_at(args, item, index):
    """Byte offset, in K and in V, of the item's head in the block that has entry `index`."""
    block = v.read_long(args[TABLES] + (item[SEQ] * args[TABLE_WIDTH] + index) * 8)
    head = item[HEAD] // args[GROUP]
    size = BLOCK * args[HEAD_DIM] * (4 >> args[HALF])
    return (block * args[KV_HEADS] + head) * size


@njit(error_model="numpy")
def _blocks(args, item, start, rows):
    """The first block that rows [start, start + rows) of an item see, and the one behind the
    last."""
    valid = item[VALID] + start * item[VALID_STEP]
    first = max(0, valid - args[WINDOW]) if args[WINDOW] > 0 else 0
    last = valid + (rows - 1) * item[VALID_STEP]
    return first // BLOCK, (last + BLOCK - 1) // BLOCK


@njit(error_model="numpy")
def _fetch(args, item, following, place):
    """Ask for a block before it is needed: blocks lie anywhere, and what fetches ahead by itself
    stops at the end of each. They are needed in the order of `place`: the item's keys, its values,
    the keys of the item that follows."""
    first, stop = _blocks(args, item, 0, min(MAX_ROWS, item[NUM_ROWS]))
    count = stop - first
    if place < count:
        block = args[K] + _block_at(args, item, first + place)
    elif place < 2 * count:
        block = args[V] + _block_at(args, item, first + place - count)
    else:
        begin, end = _blocks(args, following, 0, min(MAX_ROWS, following[NUM_ROWS]))
        index = begin + place - 2 * count
        if index >= end:
            return
        block = args[K] + _block_at(args, following, index)
    for line in range(0, BLOCK * args[HEAD_DIM] * (4 >> args[HALF]), 64):
        v.prefetch(block + line)


@njit(error_model="numpy")
def _by_library(args, item):
    return args[PRODUCT] != 0 and item[VALID_STEP] != 0


@njit(error_model="numpy")
def _score(args, item, following, q, q_stride, rows, first_block, stop_block, scores):
    """scores[m, j] = q[m] K[j], not scaled; blocks two by two, the last one twice if it is odd."""
    zero = v.splat(types.float32(0.0))
    stride, half = args[SCORE_STRIDE], args[HALF]
    steps = args[HEAD_DIM] >> half
    if _by_library(args, item):
        dim, q_numbers, numbers = args[HEAD_DIM], q_stride >> 1, stride >> 2
        for index in range(first_block, stop_block):
            at = scores + (index - first_block) * 64
            keys = args[K] + _block_at(args, item, index)
            v.library_product(
                args[PRODUCT], rows, BLOCK, dim, q_numbers, BLOCK, numbers, 0, q, keys, at, 1
            )
        return
    for index in range(first_block, stop_block, 2):
        at = scores + (index - first_block) * 64
        for row in range(rows):
            v.store(at + row * stride, zero)
            v.store(at + row * stride + 64, zero)
        one = args[K] + _block_at(args, item, index)
        two = args[K] + _block_at(args, item, min(index + 1, stop_block - 1))
        for ahead in range(AHEAD, AHEAD + min(2, stop_block - index)):
            _fetch(args, item, following, index - first_block + ahead)
        multiply(half, rows, q, q_stride, one, two, 64, steps, at, stride)


@njit(error_model="numpy")
def _soften(args, scores, blocks, low, high):
    """A row's scores become weights, 0 outside [low, high); in place, as the cache's dtype. Returns
    their sum."""
    scale = v.splat(v.float_of(args[SCALE]))
    lowest = types.float32(-3.0e38)
    best = v.splat(lowest)
    whole, end = (low + BLOCK - 1) // BLOCK, high // BLOCK
    for j in range(blocks):
        seen = v.load(scores + j * 64)
        if j < whole or j >= end:
            seen = v.keep(seen, low - j * 16, high - j * 16, lowest)
        best = v.larger(seen, best)
    top = v.splat(v.largest(best))
    summed = v.splat(types.float32(0.0))
    for j in range(blocks):
        above = v.times(v.subtract(v.load(scores + j * 64), top), scale)
        weight = v.exponential(above)
        if j < whole or j >= end:
            weight = v.keep(weight, low - j * 16, high - j * 16, types.float32(0.0))
        summed = v.add(summed, weight)
        store(args[HALF], scores + (j * 64 >> args[HALF]), weight)
    return v.total(summed)


@njit(error_model="numpy")
def _single(args, values, second, spare):
    """Return one word of two keys in a row; the other may be nobody's. Into `spare`."""
    for d in range(args[HEAD_DIM]):
        word = types.uint32(v.read_short(values + d * 4 + second * 2))
        v.write_word(spare + d * 4, word << types.uint32(16 * second))


@njit(error_model="numpy")
def _mix_steps(args, rows, weights, values, steps, mixed):
    """mixed[m] += so many words of weights and rows of values"""
    dim = args[HEAD_DIM]
    for d in range(0, dim * 4, 128):
        b, c = values + d, mixed + d
        multiply(
            args[HALF], rows, weights, args[SCORE_STRIDE], b, b + 64, dim * 4, steps, c, dim * 4
        )


@njit(error_model="numpy")
def _mix_blocks(args, item, rows, weights, first_block, count, mixed):
    """mixed[m] += the weights and values of so many whole blocks"""
    half, dim = args[HALF], args[HEAD_DIM]
    table = args[TABLES] + (item[SEQ] * args[TABLE_WIDTH] + first_block) * 8
    head_bytes = BLOCK * dim * (4 >> half)
    values, size = args[V] + item[HEAD] // args[GROUP] * head_bytes, head_bytes * args[KV_HEADS]
    stride, steps = args[SCORE_STRIDE], count * BLOCK >> half
    for d in range(0, dim * 4, 128):
        multiply_paged(
            half, rows, weights, stride, values + d, table, size, steps, mixed + d, dim * 4
        )


@njit(error_model="numpy")
def _mix_block(args, item, rows, index, begin, end, weights, mixed, spare):
    """mixed[m] += the weights and values of the keys [begin, end) of one block"""
    half, dim = args[HALF], args[HEAD_DIM]
    values = args[V] + _block_at(args, item, index)
    if begin == 0 and end == BLOCK and _by_library(args, item):
        numbers = args[SCORE_STRIDE] >> 1
        v.library_product(
            args[PRODUCT], rows, dim, BLOCK, numbers, dim, dim, 1, weights, values, mixed, 1
        )
        return
    step, stop = (begin + half) >> half, end >> half
    if step << half > begin:
        _single(args, values + (step - 1) * dim * 4, 1, spare)
        _mix_steps(args, rows, weights + (step - 1) * 4, spare, 1, mixed)
    if stop > step:
        _mix_steps(args, rows, weights + step * 4, values + step * dim * 4, stop - step, mixed)
    if end > stop << half:
        _single(args, values + stop * dim * 4, 0, spare)
        _mix_steps(args, rows, weights + stop * 4, spare, 1, mixed)


@njit(error_model="numpy")
def _mix(args, item, following, rows, first, last, weights, mixed, spare):
    """mixed[m] = sum_j weights[m, j] V[j] over the keys [first, last); weights begin with the block
    of `first`."""
    half, dim = args[HALF], args[HEAD_DIM]
    zero = v.splat(types.float32(0.0))
    for i in range(rows * dim // 16):
        v.store(mixed + i * 64, zero)
    first_block, stop_block = first // BLOCK, (last + BLOCK - 1) // BLOCK
    # A prompt's blocks are in a cache, one token's come from memory and are asked for one by one.
    at_once = item[VALID_STEP] != 0 and not _by_library(args, item)
    index = first_block
    while index < stop_block:
        a = weights + ((index - first_block) * 64 >> half)
        begin, end = max(first - index * BLOCK, 0), min(last - index * BLOCK, BLOCK)
        if at_once and begin == 0 and end == BLOCK:
            whole = last // BLOCK - index
            _mix_blocks(args, item, rows, a, index, whole, mixed)
            index += whole
            continue
        _fetch(args, item, following, stop_block - first_block + index - first_block + AHEAD)
        _mix_block(args, item, rows, index, begin, end, a, mixed, spare)
        index += 1


@njit(error_model="numpy")
def _rows_at_once(args, item):
    if _by_library(args, item):
        return LIBRARY_ROWS
    return MAX_ROWS


@njit(error_model="numpy")
def _attend_rows(args, item, following, q, q_stride, out, out_stride, start, rows, scratch):
    """Rows [start, start + rows) of an item."""
    half, dim = args[HALF], args[HEAD_DIM]
    valid = item[VALID] + start * item[VALID_STEP]
    last = valid + (rows - 1) * item[VALID_STEP]
    first = max(0, valid - args[WINDOW]) if args[WINDOW] > 0 else 0
    first_block, stop_block = _blocks(args, item, start, rows)
    spare = scratch
    mixed = spare + dim * 4
    scores = mixed + _rows_at_once(args, item) * dim * 4
    sums = tile_memory()
    _score(args, item, following, q, q_stride, rows, first_block, stop_block, scores)
    for row in range(rows):
        high = valid + row * item[VALID_STEP]
        low = max(0, high - args[WINDOW]) if args[WINDOW] > 0 else 0
        origin = first_block * BLOCK
        summed = _soften(
            args,
            scores + row * args[SCORE_STRIDE],
            stop_block - first_block,
            low - origin,
            high - origin,
        )
        v.write_float(sums + row * 4, summed)
    _mix(args, item, following, rows, first, last, scores, mixed, spare)
    for row in range(rows):
        share = v.splat(types.float32(1.0) / v.read_float(sums + row * 4))
        for i in range(dim // 16):
            value = v.times(v.load(mixed + row * dim * 4 + i * 64), share)
            store(half, out + row * out_stride + (i * 64 >> half), value)


@njit(error_model="numpy")
def _item(args, index):
    return v.pointer_to(args[ITEMS] + min(index, args[NUM_ITEMS] - 1) * ITEM_WIDTH * 8)


@cfunc(SIGNATURE, error_model="numpy", cache=True)
def attend(args):
    hold_multiply()
    hold_multiply_paged()
    counter = v.address_of(args)
    scratch = args[SCRATCH] + v.next_index(counter + SLOT * 8) * args[SCRATCH_BYTES]
    row_bytes = args[HEAD_DIM] * (4 >> args[HALF])
    index = v.next_index(counter)
    for place in range(AHEAD):
        _fetch(args, _item(args, index), _item(args, index), place)
    while index < args[NUM_ITEMS]:
        behind = v.next_index(counter)
        item, following = _item(args, index), _item(args, behind)
        q_stride = args[Q_STRIDE] if item[VALID_STEP] else row_bytes
        out_stride = args[OUT_STRIDE] if item[VALID_STEP] else row_bytes
        q = args[Q] + item[TOKEN] * args[Q_STRIDE] + item[HEAD] * row_bytes
        out = args[OUT] + item[TOKEN] * args[OUT_STRIDE] + item[HEAD] * row_bytes
        most = _rows_at_once(args, item)
        for start in range(0, item[NUM_ROWS], most):
            rows = min(most, item[NUM_ROWS] - start)
            _attend_rows(
                args,
                item,
                following,
                q + start * q_stride,
                q_stride,
                out + start * out_stride,
                out_stride,
                start,
                rows,
                scratch,
            )
        index = behind
    if args[PRODUCT] != 0:
        v.call(args[RELEASE], 1)
