"""The draw of one token a row: maximum, threshold, uniform, inverse of the running sum.

Two launches. `_maximum_kernel`, grid (S, V / TILE), finds each tile's largest logit.
`_draw_kernel`, grid (S), reduces those; greedy rows end there, having read every logit once. Other
rows pass over their logits, which stay in the L2 cache, twice: for the total and up to the token
drawn. top_k and top_p add passes: the key of s = (x - max) / temperature is the bit pattern of |s|,
which ascends as likelihood falls, and each pass counts what lies at or before 8 pivots that divide
what is left of the keys' range, which is then cut to the keys that occur: at most 11 passes,
commonly 4 to 6. A pass is bound by arithmetic, some 60 instructions a logit, so after two of them
the keys still in range are put into a short list, which the other passes read instead.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.aot import AotCase
from engine.kernels.sampling.types import GREEDY_TEMPERATURE, MAX_VOCAB, SamplingTensors
from engine.kernels.tuning import launch_config

TILE = 4096
"""Logits of a row that one program of the first launch looks at."""
PIVOTS = tl.constexpr(8)
PIVOT_BITS = tl.constexpr(3)
FIRST_LIST, SECOND_LIST = tl.constexpr(2), tl.constexpr(4)
"""Passes after which the keys still in range are put into a list, if it has room for them."""
WEIGHT_UNITS = tl.constexpr(float(1 << 42))
"""The weight of the most likely token; a sum over MAX_VOCAB of them is below 2**63."""
INFINITE = tl.constexpr(0x7F800000)
"""The key of a logit of -inf: the largest."""
GREEDY = tl.constexpr(GREEDY_TEMPERATURE)


@triton.jit
def _maximum_kernel(
    logits_ptr, best_ptr, ids_ptr, VOCAB: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr
):
    """best float32, ids int32: [S, TILES]. Not a number counts as infinite."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    at = logits_ptr + row * VOCAB + token
    x = tl.load(at, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("inf"), x)
    best = tl.max(x, axis=0)
    tl.store(best_ptr + row * TILES + tile, best)
    tl.store(ids_ptr + row * TILES + tile, tl.min(tl.where(x == best, token, VOCAB), axis=0))


@triton.jit
def _weights(key):
    """exp(s) of the keys, int64 in units of 2**-42."""
    return (tl.exp(-key.to(tl.float32, bitcast=True)) * WEIGHT_UNITS).to(tl.int64)


@triton.jit
def _keys(row_ptr, start, best, temperature, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Keys int32 [BLOCK] of the tokens from `start` on; past the end the largest, of no weight."""
    token = start + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    return tl.abs(tl.div_rn(x - best, temperature)).to(tl.int32, bitcast=True)


@triton.jit
def _measure(
    row_ptr, list_ptr, held, best, temperature, pivots, low, high, BY_WEIGHT: tl.constexpr,
    LISTED: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Measure what lies at or before each pivot, and the first and last key in [low, high]; of all
    tokens or, LISTED, of the `held` keys of the list.
    """
    amounts = tl.zeros((PIVOTS, BLOCK), tl.int64)
    first = tl.full((BLOCK,), INFINITE, tl.int32)
    last = tl.zeros((BLOCK,), tl.int32)
    stop = held if LISTED else VOCAB
    for start in tl.range(0, stop, BLOCK, num_stages=3):
        if LISTED:
            place = start + tl.arange(0, BLOCK)
            key = tl.load(list_ptr + place, mask=place < held, other=INFINITE)
        else:
            key = _keys(row_ptr, start, best, temperature, VOCAB, BLOCK)
        column = key[None, :]
        amount = _weights(column) if BY_WEIGHT else tl.full((1, BLOCK), 1, tl.int64)
        amounts += tl.where(column <= pivots[:, None], amount, 0)
        within = (key >= low) & (key <= high)
        first = tl.minimum(first, tl.where(within, key, INFINITE))
        last = tl.maximum(last, tl.where(within, key, 0))
    return tl.sum(amounts, axis=1), tl.min(first, axis=0), tl.max(last, axis=0)


@triton.jit
def _collect(
    row_ptr, list_ptr, best, temperature, low, high, BY_WEIGHT: tl.constexpr, ROOM: tl.constexpr,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Puts the keys in [low, high] into the list, as many as it has room for. Their number, and
    what lies before `low`."""
    held = tl.zeros((), tl.int32)
    before = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, VOCAB, BLOCK):
        key = _keys(row_ptr, start, best, temperature, VOCAB, BLOCK)
        amount = _weights(key) if BY_WEIGHT else tl.full((BLOCK,), 1, tl.int64)
        before += tl.where(key < low, amount, 0)
        within = (key >= low) & (key <= high) & (start + tl.arange(0, BLOCK) < VOCAB)
        place = held + tl.cumsum(within.to(tl.int32), axis=0) - 1
        tl.store(list_ptr + place, key, mask=within & (place < ROOM))
        held += tl.sum(within.to(tl.int32), axis=0)
    tl.debug_barrier()  # what one thread stored, others load
    return held, tl.sum(before, axis=0)


@triton.jit
def _search(
    row_ptr, list_ptr, best, temperature, target, high, BY_WEIGHT: tl.constexpr,
    ROOM: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The smallest key with at least `target`, tokens or weight, at or before it; `high` is such a
    key. The answer is a key that occurs, so the range may always be cut to those."""
    low = tl.zeros_like(high)
    before = tl.zeros((), tl.int64)
    held = tl.full((), ROOM + 1, tl.int32)
    passes = 0
    while low < high:
        if (held > ROOM) & ((passes == FIRST_LIST) | (passes == SECOND_LIST)):
            held, before = _collect(
                row_ptr, list_ptr, best, temperature, low, high, BY_WEIGHT, ROOM, VOCAB, BLOCK
            )
        step = tl.arange(0, PIVOTS)
        pivots = low + (((high - low).to(tl.int64) * step) >> PIVOT_BITS).to(tl.int32)
        if held <= ROOM:
            amounts, first, last = _measure(
                row_ptr, list_ptr, held, best, temperature, pivots, low, high, BY_WEIGHT, True,
                VOCAB, BLOCK,
            )  # fmt: skip
            amounts += before
        else:
            amounts, first, last = _measure(
                row_ptr, list_ptr, held, best, temperature, pivots, low, high, BY_WEIGHT, False,
                VOCAB, BLOCK,
            )  # fmt: skip
        enough = amounts >= target
        lowest = tl.max(tl.where(enough, low, pivots + 1), axis=0)
        highest = tl.min(tl.where(enough, pivots, high), axis=0)
        low = tl.maximum(lowest, first)
        high = tl.minimum(highest, last)
        passes += 1
    return high


@triton.jit
def _kept(row_ptr, start, best, temperature, limit, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Weights int64 [BLOCK] of the tokens from `start` on, zero where the key is past `limit`."""
    key = _keys(row_ptr, start, best, temperature, VOCAB, BLOCK)
    return tl.where(key <= limit, _weights(key), 0)


@triton.jit
def _total(row_ptr, best, temperature, limit, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    weights = tl.zeros((BLOCK,), tl.int64)
    for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
        weights += _kept(row_ptr, start, best, temperature, limit, VOCAB, BLOCK)
    return tl.sum(weights, axis=0)


@triton.jit
def _uniform(seed, position):
    """A multiple of 2**-52 in [0, 1), as an unsigned 64-bit fraction."""
    low, high = position.to(tl.uint32), (position.to(tl.uint64) >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    word0, word1, _, _ = tl.philox(seed.to(tl.uint64), low, high, zero, zero)
    return ((word1.to(tl.uint64) << 20) | (word0.to(tl.uint64) >> 12)) << 12


@triton.jit
def _locate(row_ptr, best, temperature, limit, fraction, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The first token whose running sum of kept weights exceeds `fraction` of the total."""
    total = _total(row_ptr, best, temperature, limit, VOCAB, BLOCK)
    point = tl.umulhi(fraction, total.to(tl.uint64)).to(tl.int64)
    start, before = 0, tl.zeros_like(point)
    here = tl.sum(_kept(row_ptr, start, best, temperature, limit, VOCAB, BLOCK), axis=0)
    while before + here <= point:
        before += here
        start += BLOCK
        here = tl.sum(_kept(row_ptr, start, best, temperature, limit, VOCAB, BLOCK), axis=0)
    sums = before + tl.cumsum(_kept(row_ptr, start, best, temperature, limit, VOCAB, BLOCK), axis=0)
    return start + tl.min(tl.where(sums > point, tl.arange(0, BLOCK), BLOCK), axis=0)


@triton.jit
def _limit(
    row_ptr, list_ptr, best, temperature, log_min_p, top_k, top_p, ROOM: tl.constexpr,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest key that min_p, top_k and top_p keep."""
    limit = tl.abs(log_min_p).to(tl.int32, bitcast=True)
    if (top_k > 0) & (top_k < VOCAB):
        most = tl.full((), INFINITE, tl.int32)
        kth = _search(row_ptr, list_ptr, best, temperature, top_k, most, False, ROOM, VOCAB, BLOCK)
        limit = tl.minimum(limit, kth)
    if top_p < 1.0:
        total = _total(row_ptr, best, temperature, limit, VOCAB, BLOCK)
        share = top_p * total.to(tl.float64)
        target = share.to(tl.int64)
        target += (target.to(tl.float64) < share).to(tl.int64)
        target = tl.minimum(tl.maximum(target, 1), total)
        limit = _search(
            row_ptr, list_ptr, best, temperature, target, limit, True, ROOM, VOCAB, BLOCK
        )
    return limit


@triton.jit
def _draw_kernel(
    logits_ptr, best_ptr, ids_ptr, temperature_ptr, log_min_p_ptr, top_k_ptr, top_p_ptr, seeds_ptr,
    positions_ptr, lists_ptr, out_ptr, VOCAB: tl.constexpr, TILES: tl.constexpr,
    TILES_BLOCK: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES_BLOCK)
    each = tl.load(best_ptr + row * TILES + tile, mask=tile < TILES, other=float("-inf"))
    ids = tl.load(ids_ptr + row * TILES + tile, mask=tile < TILES, other=VOCAB)
    best = tl.max(each, axis=0)
    chosen = tl.min(tl.where(each == best, ids, VOCAB), axis=0)
    temperature = tl.load(temperature_ptr + row)
    if tl.abs(best) == float("inf"):
        chosen = tl.full((), -1, tl.int32)
    elif temperature >= GREEDY:
        row_ptr = logits_ptr + row * VOCAB
        limit = _limit(
            row_ptr, lists_ptr + row * ROOM, best, temperature, tl.load(log_min_p_ptr + row),
            tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), ROOM, VOCAB, BLOCK,
        )  # fmt: skip
        fraction = _uniform(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
        chosen = _locate(row_ptr, best, temperature, limit, fraction, VOCAB, BLOCK)
    tl.store(out_ptr + row, chosen.to(tl.int64))


def tile_maxima(logits: Tensor) -> tuple[Tensor, Tensor]:
    """[S, V] -> the largest logit of each tile of a row, float32 [S, tiles], and its token, int32,
    the lowest of equals. Not a number counts as infinite."""
    assert logits.is_contiguous()
    rows, vocab = logits.shape
    tiles = triton.cdiv(vocab, TILE)
    best = torch.empty(rows, tiles, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, tiles, dtype=torch.int32, device=logits.device)
    if rows:
        _maximum_kernel[(rows, tiles)](
            logits, best, ids, VOCAB=vocab, TILES=tiles, TILE=TILE, num_warps=8
        )
    return best, ids


def draw(
    logits: Tensor, params: SamplingTensors, out: Tensor | None = None, lists: Tensor | None = None
) -> Tensor:
    """Sample as `dispatch.sample` does, from logits [S, V] that are adjusted already. out: int64
    [S]. lists: int32 [>= S, ROOM], scratch."""
    rows, vocab = logits.shape
    assert vocab <= MAX_VOCAB
    out = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    if rows == 0:
        return out
    best, ids = tile_maxima(logits)
    config = launch_config("sampling_draw", f"vocab{vocab}", DEFAULT)
    if lists is None:
        lists = torch.empty(rows, config["ROOM"], dtype=torch.int32, device=logits.device)
    _draw_kernel[(rows,)](
        logits, best, ids, params.temperature, params.log_min_p, params.top_k, params.top_p,
        params.seeds, params.positions, lists, out, VOCAB=vocab, TILES=best.shape[1],
        TILES_BLOCK=triton.next_power_of_2(best.shape[1]), **config,
    )  # fmt: skip
    return out


DEFAULT = {"BLOCK": 1024, "ROOM": 8192, "num_warps": 8}
KINDS = {
    "ids_ptr": "*i32",
    "top_k_ptr": "*i32",
    "top_p_ptr": "*fp64",
    "seeds_ptr": "*i64",
    "positions_ptr": "*i64",
    "lists_ptr": "*i32",
    "out_ptr": "*i64",
}


def _aot(name: str, kernel: triton.JITFunction, vocab: int, dtype: str, warps: int) -> AotCase:
    tiles = triton.cdiv(vocab, TILE)
    every = {"VOCAB": vocab, "TILES": tiles, "TILE": TILE, **DEFAULT}
    every["TILES_BLOCK"] = triton.next_power_of_2(tiles)
    constexprs = {arg: every[arg] for arg in kernel.arg_names if arg in every}
    kinds = KINDS | {"logits_ptr": f"*{dtype}"}
    signature = {arg: kinds.get(arg, "*fp32") for arg in kernel.arg_names if arg not in constexprs}
    return AotCase(f"{name} {vocab} {dtype}", kernel, signature, constexprs, num_warps=warps)


AOT = [
    *(
        _aot("sampling_maximum", _maximum_kernel, vocab, dtype, 8)
        for vocab, dtype in ((32000, "bf16"), (128256, "bf16"), (151936, "bf16"), (128256, "fp32"))
    ),
    *(
        _aot("sampling_draw", _draw_kernel, vocab, dtype, DEFAULT["num_warps"])
        for vocab, dtype in ((32000, "bf16"), (128256, "bf16"), (151936, "bf16"), (128256, "fp32"))
    ),
]
