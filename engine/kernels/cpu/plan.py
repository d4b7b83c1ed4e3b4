"""Plans what attention reads of a step besides its numbers: where new keys go, and who computes
what.

One thread, a few microseconds: between two steps the caches hold weights, and each of the dozens of
array operations that this would be takes as long as all of it does here.
"""

from __future__ import annotations

from numba import cfunc, njit, types

from engine.kernels.cpu import vectors as v
from engine.kernels.cpu.items import BLOCK, ITEM_WIDTH

SIGNATURE = types.void(types.CPointer(types.int64))

(
    QUERY_LENS,
    SEQ_LENS,
    NUM_SEQS,
    NUM_SINGLE,
    TABLES,
    TABLE_WIDTH,
    SLOTS,
    ITEMS,
    HEADS,
    KV_HEADS,
    ROWS,
) = range(11)
"""Arguments, all int64: addresses of int64 [NUM_SEQS] twice, of which the first NUM_SINGLE have one
query, [NUM_SEQS, TABLE_WIDTH], and what is written: slots [T] and items [n, ITEM_WIDTH], one
for each KV head and single query, and for each head and ROWS tokens, or fewer, of a prompt."""


@njit(error_model="numpy")
def _write_slots(args):
    slot = args[SLOTS]
    for seq in range(args[NUM_SEQS]):
        stop = v.read_long(args[SEQ_LENS] + seq * 8)
        table = args[TABLES] + seq * args[TABLE_WIDTH] * 8
        for position in range(stop - v.read_long(args[QUERY_LENS] + seq * 8), stop):
            block = v.read_long(table + position // BLOCK * 8)
            v.write_long(slot, block * BLOCK + position % BLOCK)
            slot += 8
    return slot


@njit(error_model="numpy")
def _write_item(place, seq, head, token, rows, valid, step):
    v.write_long(place, seq)
    v.write_long(place + 8, head)
    v.write_long(place + 16, token)
    v.write_long(place + 24, rows)
    v.write_long(place + 32, valid)
    v.write_long(place + 40, step)
    return place + ITEM_WIDTH * 8


@cfunc(SIGNATURE, error_model="numpy", cache=True)
def plan(args):
    place = args[ITEMS]
    token = (_write_slots(args) - args[SLOTS]) // 8
    for seq in range(args[NUM_SEQS] - 1, args[NUM_SINGLE] - 1, -1):  # the longest come first
        queries = v.read_long(args[QUERY_LENS] + seq * 8)
        before = v.read_long(args[SEQ_LENS] + seq * 8) - queries
        token -= queries
        for at in range((queries - 1) // args[ROWS] * args[ROWS], -1, -args[ROWS]):
            rows = min(args[ROWS], queries - at)
            for head in range(args[HEADS]):
                place = _write_item(place, seq, head, token + at, rows, before + at + 1, 1)
    group = args[HEADS] // args[KV_HEADS]
    for seq in range(args[NUM_SINGLE]):
        valid = v.read_long(args[SEQ_LENS] + seq * 8)
        for head in range(0, args[HEADS], group):
            place = _write_item(place, seq, head, seq, group, valid, 0)
