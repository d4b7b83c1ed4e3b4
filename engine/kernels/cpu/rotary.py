"""Queries and keys normalised and turned, keys and values put into the paged cache, in one pass.

    q, k <- rms_norm(q), rms_norm(k)            per head, where there are weights for it
    (a, b) <- (a cos - b sin, b cos + a sin)    q and k; channels i and i + head_dim / 2 are a pair

Computed in float32, rounded once. Queries and keys are turned where they are.
"""

from __future__ import annotations

from numba import cfunc, njit, types

from engine.kernels.cpu import vectors as v
from engine.kernels.cpu.items import BLOCK
from engine.kernels.cpu.products import load, store

SIGNATURE = types.void(types.CPointer(types.int64))

(
    COUNTER,
    QKV,
    STRIDE,
    TOKENS,
    HEADS,
    KV_HEADS,
    HEAD_DIM,
    COS,
    SIN,
    SLOTS,
    K,
    V,
    Q_WEIGHT,
    K_WEIGHT,
    EPS,
    HALF,
) = range(16)
"""Arguments, all int64. COS [T, head_dim] and SIN [T, head_dim / 2] in the model's dtype, SLOTS
int64 [T], negative where nothing is kept; the weights 0 for none, EPS the bits of a float32."""


@njit(error_model="numpy")
def _normalise(row, dim, weight, eps, half):
    squares = v.splat(types.float32(0.0))
    for i in range(0, dim, 16):
        x = load(half, row + (i * 4 >> half))
        squares = v.fused(x, x, squares)
    mean = v.total(squares) / types.float32(dim) + eps
    factor = v.splat(types.float32(1.0) / v.root(mean))
    for i in range(0, dim, 16):
        x = v.times(load(half, row + (i * 4 >> half)), factor)
        x = v.times(x, load(half, weight + (i * 4 >> half)))
        store(half, row + (i * 4 >> half), x)


@njit(error_model="numpy")
def _turn(row, dim, cos, sin, half):
    zero = v.splat(types.float32(0.0))
    for i in range(0, dim // 2, 16):
        at, other = row + (i * 4 >> half), row + ((dim // 2 + i) * 4 >> half)
        a, b = load(half, at), load(half, other)
        c, s = load(half, cos + (i * 4 >> half)), load(half, sin + (i * 4 >> half))
        store(half, at, v.fused(a, c, v.subtract(zero, v.times(b, s))))
        store(half, other, v.fused(b, c, v.times(a, s)))


@njit(error_model="numpy")
def _keep(args, key, value, slot, head):
    """Into the block: the key's words 16 apart, the value's channels a word apart."""
    dim, half = args[HEAD_DIM], args[HALF]
    block, place = slot // BLOCK, slot % BLOCK
    start = (block * args[KV_HEADS] + head) * BLOCK * dim * (4 >> half)
    keys = args[K] + start + place * 4
    for i in range(dim >> half):
        v.write_word(keys + i * 64, v.read_word(key + i * 4))
    if half:
        values = args[V] + start + (place >> 1) * dim * 4 + (place & 1) * 2
        for d in range(dim):
            v.write_short(values + d * 4, v.read_short(value + d * 2))
    else:
        values = args[V] + start + place * dim * 4
        for d in range(0, dim * 4, 64):
            v.store(values + d, v.load(value + d))


@cfunc(SIGNATURE, error_model="numpy", cache=True)
def rotate_and_store(args):
    counter = v.address_of(args)
    dim, half = args[HEAD_DIM], args[HALF]
    size = 4 >> half
    eps = v.float_of(args[EPS])
    while True:
        token = v.next_index(counter)
        if token >= args[TOKENS]:
            return
        row = args[QKV] + token * args[STRIDE]
        cos, sin = args[COS] + token * dim * size, args[SIN] + token * dim * size // 2
        for head in range(args[HEADS] + args[KV_HEADS]):
            at = row + head * dim * size
            if args[Q_WEIGHT] != 0:
                weight = args[Q_WEIGHT] if head < args[HEADS] else args[K_WEIGHT]
                _normalise(at, dim, weight, eps, half)
            _turn(at, dim, cos, sin, half)
        slot = v.read_long(args[SLOTS] + token * 8)
        if slot < 0:
            continue
        keys = row + args[HEADS] * dim * size
        for head in range(args[KV_HEADS]):
            key = keys + head * dim * size
            _keep(args, key, key + args[KV_HEADS] * dim * size, slot, head)
