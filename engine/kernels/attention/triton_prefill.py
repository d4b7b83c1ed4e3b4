"""Attention of prompt chunks over the paged cache, and the tile arithmetic that decoding shares.

Knows no requests; reads a step's sizes on the device, so that a launch can stand in a CUDA graph.

For each query i of a sequence, at position p, over the keys j it sees (p - window < j <= p):

    out[i] = sum_j softmax_j(scale * <q[i], k[j]>) * v[j]

computed one tile of keys at a time with a running maximum and sum (FlashAttention-2,
arXiv:2307.08691) in float32. The query heads that share a KV head are rows of one tile (row r is
query r // group, head r % group), so that keys and values are read once for all of them.

Grid: (query tiles of all chunks, KV heads). A program finds its sequence by binary search over
`query_start`; the bound is tokens // queries-per-tile + sequences, and programs past the end leave.
Later tiles see more keys and are started first. Tiles of keys begin at multiples of BLOCK_N of the
absolute position, tiles outside the window are skipped, and only those that the diagonal or the
window's edge cuts are masked.

Bytes: q and out once; keys and values once per tile of queries, so
2 * heads/group * head_dim * keys * ceil(queries * group / BLOCK_M) elements, mostly from the L2.
Operations: 4 * head_dim per visible (query, head, key). Above about 200 of these a byte it is the
matrix units that limit (H200).

Deterministic (SPLIT > 0): keys are summed up in spans of SPLIT, and the spans are merged in order,
exactly as the decoding kernel and its reduction do: bits depend neither on the chunk's start nor on
the batch. Spans that a row does not see add exact zeros.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.aot import AotCase
from engine.kernels.tuning import launch_config

DETERMINISTIC_SPLIT = 512
"""Keys of a span that is summed apart, the same in every batch."""


@triton.jit
def attend_span(
    q, m, total, acc, k_head, v_head, table, position, first_key, start, stop, scale_log2,
    block_stride, HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add keys [start, stop) to the sums of a tile of rows.

    q, acc: [M, D]. m (maximum, base 2), total, position: [M]. table: the sequence's blocks.
    start is a multiple of BLOCK_N; so is stop, unless no row sees a key from it on. No row sees a
    key before first_key. Without MASKED every row sees every key.
    """
    dims = tl.arange(0, D)
    for first in tl.range(start, stop, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        if MASKED:
            # Keys behind the end or before the window may be nobody's, and 0 * NaN is NaN.
            owned = keys < stop
            if WINDOW > 0:
                owned = owned & (keys >= first_key)
            blocks = tl.load(table + keys // BLOCK_SIZE, mask=owned, other=0)
            rows = blocks.to(tl.int64) * block_stride + (keys % BLOCK_SIZE) * HEAD_DIM
            k_mask = owned[None, :] & (dims < HEAD_DIM)[:, None]
            v_mask = owned[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(k_head + rows[None, :] + dims[:, None], mask=k_mask, other=0.0)
            v = tl.load(v_head + rows[:, None] + dims[None, :], mask=v_mask, other=0.0)
        elif HEAD_DIM != D:
            blocks = tl.load(table + keys // BLOCK_SIZE)
            rows = blocks.to(tl.int64) * block_stride + (keys % BLOCK_SIZE) * HEAD_DIM
            inside = dims < HEAD_DIM
            k = tl.load(k_head + rows[None, :] + dims[:, None], mask=inside[:, None], other=0.0)
            v = tl.load(v_head + rows[:, None] + dims[None, :], mask=inside[None, :], other=0.0)
        else:
            blocks = tl.load(table + keys // BLOCK_SIZE)
            rows = blocks.to(tl.int64) * block_stride + (keys % BLOCK_SIZE) * HEAD_DIM
            k = tl.load(k_head + rows[None, :] + dims[:, None])
            v = tl.load(v_head + rows[:, None] + dims[None, :])
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
        if MASKED:
            seen = keys[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (keys[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(m, tl.max(scores, 1) * scale_log2)
        # A row that has seen nothing yet stays at -inf, 0, 0.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(scores * scale_log2 - base[:, None])
        kept = tl.exp2(m - base)
        total = total * kept + tl.sum(weight, 1)
        acc = acc * kept[:, None]
        acc = tl.dot(weight.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
        m = higher
    return m, total, acc


@triton.jit
def merge_weights(m, m_span):
    """The new maximum, and what multiplies the sums so far and those of a further span."""
    higher = tl.maximum(m, m_span)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, tl.exp2(m - base), tl.exp2(m_span - base)


@triton.jit
def load_queries(q_ptr, token, head, valid, q_stride, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    """[M, D] of rows (token, head) [M]; zeros where not `valid` and in the padding."""
    dims = tl.arange(0, D)
    at = token.to(tl.int64) * q_stride + head * HEAD_DIM
    mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
    return tl.load(q_ptr + at[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(
    out_ptr, rows, token, head, valid, out_stride, HEAD_DIM: tl.constexpr, D: tl.constexpr
):
    """Write rows [M, D] to out [T, heads * HEAD_DIM]."""
    dims = tl.arange(0, D)
    at = token.to(tl.int64) * out_stride + head * HEAD_DIM
    mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out_ptr + at[:, None] + dims[None, :], rows.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _find_tile(query_start_ptr, tile, first_seq, num_seqs, BLOCK_Q: tl.constexpr):
    """The sequence of a query tile and the first query of the tile within it.

    Sequence s owns the tiles from (its first chunk token) // BLOCK_Q + (its number) on: at least as
    many as it needs.
    """
    origin = tl.load(query_start_ptr + first_seq)
    low, high = first_seq, num_seqs
    while low < high:
        middle = (low + high) // 2
        begin = (tl.load(query_start_ptr + middle) - origin) // BLOCK_Q + middle - first_seq
        if begin <= tile:
            low = middle + 1
        else:
            high = middle
    seq = low - 1
    begin = (tl.load(query_start_ptr + seq) - origin) // BLOCK_Q + seq - first_seq
    return seq, (tile - begin) * BLOCK_Q


@triton.jit
def _attend_at_once(
    q, k_head, v_head, table, position, first_key, start, stop, first_position, scale_log2,
    block_stride, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Sums over keys [start, stop): those at the window's edge, whole tiles, the diagonal."""
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    whole_start = start
    whole_stop = (first_position + 1) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        last_start = tl.maximum(stop - WINDOW, 0)
        whole_start = tl.minimum(tl.cdiv(last_start, BLOCK_N) * BLOCK_N, stop)
        whole_stop = tl.maximum(whole_start, whole_stop)
    begin = start
    for PHASE in tl.static_range(0 if WINDOW > 0 else 1, 3):
        end = whole_start if PHASE == 0 else (whole_stop if PHASE == 1 else stop)
        m, total, acc = attend_span(
            q, m, total, acc, k_head, v_head, table, position, first_key, begin, end, scale_log2,
            block_stride, HEAD_DIM, D, BLOCK_SIZE, BLOCK_N, WINDOW, PHASE != 1
        )  # fmt: skip
        begin = end
    return total, acc


@triton.jit
def _attend_in_spans(
    q, k_head, v_head, table, position, first_key, start, stop, scale_log2, block_stride,
    BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The same sums, those of each span of SPLIT keys apart, merged in order."""
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for span in tl.range(start // SPLIT * SPLIT, stop, SPLIT, num_stages=1):
        m_span, total_span, acc_span = attend_span(
            q,
            tl.full([BLOCK_M], float("-inf"), tl.float32),
            tl.zeros([BLOCK_M], tl.float32),
            tl.zeros([BLOCK_M, D], tl.float32),
            k_head, v_head, table, position, first_key,
            tl.maximum(span, start), tl.minimum(span + SPLIT, stop),
            scale_log2, block_stride, HEAD_DIM, D, BLOCK_SIZE, BLOCK_N, WINDOW, True
        )  # fmt: skip
        m, kept, added = merge_weights(m, m_span)
        total = total * kept + total_span * added
        acc = acc * kept[:, None] + acc_span * added[:, None]
    return total, acc


@triton.jit(do_not_specialize=["first_seq", "num_seqs"])
def prefill_kernel(
    out_ptr, q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
    query_start_ptr, seq_lens_ptr, block_tables_ptr,
    scale_log2, first_seq, num_seqs, q_stride, out_stride, table_stride, block_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq, first_query = _find_tile(query_start_ptr, tile, first_seq, num_seqs, BLOCK_Q)
    row_start = tl.load(query_start_ptr + seq)
    num_queries = tl.load(query_start_ptr + seq + 1) - row_start
    if first_query >= num_queries:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    rows = tl.arange(0, BLOCK_M)
    query = first_query + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    valid = (query < num_queries) & (rows < BLOCK_Q * GROUP)
    # Rows to spare repeat the last one, so that they see a key too.
    query = tl.minimum(query, tl.minimum(first_query + BLOCK_Q, num_queries) - 1)
    before = seq_len - num_queries
    position = before + query
    q = load_queries(q_ptr, row_start + query, head, valid, q_stride, HEAD_DIM, D)
    if SCALED:
        scale_log2 *= tl.load(k_scale_ptr + kv_head)
    k_head = k_ptr + kv_head * BLOCK_SIZE * HEAD_DIM
    v_head = v_ptr + kv_head * BLOCK_SIZE * HEAD_DIM
    table = block_tables_ptr + seq.to(tl.int64) * table_stride

    first_position = before + first_query
    stop = tl.minimum(first_position + BLOCK_Q, seq_len)
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(first_position - WINDOW + 1, 0)
    start = first_key // BLOCK_N * BLOCK_N
    if SPLIT > 0:
        total, acc = _attend_in_spans(
            q, k_head, v_head, table, position, first_key, start, stop, scale_log2, block_stride,
            BLOCK_M, HEAD_DIM, D, BLOCK_SIZE, BLOCK_N, WINDOW, SPLIT
        )  # fmt: skip
    else:
        total, acc = _attend_at_once(
            q, k_head, v_head, table, position, first_key, start, stop, first_position,
            scale_log2, block_stride, BLOCK_M, HEAD_DIM, D, BLOCK_SIZE, BLOCK_N, WINDOW
        )  # fmt: skip
    acc = acc / total[:, None]
    if SCALED:
        acc = acc * tl.load(v_scale_ptr + kv_head)
    store_rows(out_ptr, acc, row_start + query, head, valid, out_stride, HEAD_DIM, D)


class PrefillConfig(NamedTuple):
    block_m: int
    """Rows of a tile: queries times the heads of a group; at least the group."""
    block_n: int
    """Keys of a tile."""
    num_warps: int
    num_stages: int
    split: int = 0
    """Keys of a span that is summed apart (deterministic); 0 sums all at once."""


def prefill_config(
    group: int, head_dim: int, max_query_len: int, *, deterministic: bool
) -> PrefillConfig:
    """Good for Hopper, unless the device has a table. Deterministic, nothing may depend on what a
    batch holds, and decoding must use the same tiles."""
    wide = head_dim > 128
    if deterministic:
        block_m = max(64, triton.next_power_of_2(group))
        # Two sets of sums are kept: with fewer warps they would not fit in the registers.
        return PrefillConfig(block_m, 32 if wide else 64, 8, 2, DETERMINISTIC_SPLIT)
    if wide:
        key, config = "long", PrefillConfig(64, 32, 8, 2)
    elif max_query_len * group <= 64:
        key, config = "short", PrefillConfig(64, 32, 4, 3)
    else:
        key, config = "long", PrefillConfig(128, 64, 8, 3)
    tuned = launch_config("prefill_attention", f"d{head_dim}-{key}", config._asdict())
    return PrefillConfig(**tuned)


def launch_prefill(
    out: Tensor,
    q: Tensor,
    cache: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    *,
    scale_log2: float,
    first_seq: int,
    max_tokens: int,
    window: int | None,
    config: PrefillConfig,
) -> None:
    """Attention of sequences [first_seq, S) into their rows of `out` [T, heads * head_dim].

    q: [T, heads, head_dim], rows of any stride. cache: keys, values and their scales per head.
    max_tokens: at least the tokens of these sequences.
    """
    k, v, k_scale, v_scale = cache
    _, kv_heads, block_size, head_dim = k.shape
    group = q.shape[1] // kv_heads
    num_seqs = seq_lens.shape[0]
    block_m = max(config.block_m, triton.next_power_of_2(group))
    assert q.stride(1) == head_dim and q.stride(2) == 1 and out.stride(1) == 1
    tiles = max_tokens // (block_m // group) + num_seqs - first_seq
    prefill_kernel[(tiles, kv_heads)](
        out, q, k, v, k_scale, v_scale, query_start, seq_lens, block_tables, scale_log2, first_seq,
        num_seqs, q.stride(0), out.stride(0), block_tables.stride(0), k.stride(0), GROUP=group,
        HEAD_DIM=head_dim, D=triton.next_power_of_2(head_dim), BLOCK_SIZE=block_size,
        BLOCK_M=block_m, BLOCK_N=config.block_n, WINDOW=window or 0, SPLIT=config.split,
        SCALED=k_scale is not None, num_warps=config.num_warps, num_stages=config.num_stages,
        enable_fp_fusion=config.split == 0,
    )  # fmt: skip


_SHAPES = (
    # group, head_dim, window
    (4, 128, 0),  # Llama 3, Mistral, Qwen3
    (4, 128, 4096),
    (7, 128, 0),  # Qwen2.5 7B
    (8, 128, 0),
    (1, 128, 0),
    (4, 64, 0),
    (3, 64, 0),  # SmolLM2
    (1, 80, 0),
    (1, 96, 0),
    (4, 256, 0),
)


def aot_signature(dtype: str, cache: str, integers: tuple[str, ...]) -> dict[str, str]:
    """Return the types of the arguments that both attention kernels begin with, and of their
    `integers`.
    """
    scale = "*fp32" if cache != dtype else "constexpr"
    tensors = {"out_ptr": dtype, "q_ptr": dtype, "k_ptr": cache, "v_ptr": cache}
    step = dict.fromkeys(("query_start_ptr", "seq_lens_ptr", "block_tables_ptr"), "*i32")
    scales = {"k_scale_ptr": scale, "v_scale_ptr": scale}
    return tensors | scales | step | {"scale_log2": "fp32"} | dict.fromkeys(integers, "i32:16")


def aot_constants(group: int, head_dim: int, window: int, scaled: bool) -> dict[str, object]:
    """Return the constants that both attention kernels are specialised for."""
    absent = {} if scaled else {"k_scale_ptr": None, "v_scale_ptr": None}
    padded = triton.next_power_of_2(head_dim)
    shape = {"GROUP": group, "HEAD_DIM": head_dim, "D": padded, "BLOCK_SIZE": 16, "WINDOW": window}
    return absent | shape | {"SCALED": scaled}


def _aot(
    group: int, head_dim: int, window: int, dtype: str, cache: str, deterministic: bool
) -> AotCase:
    config = prefill_config(group, head_dim, 8192, deterministic=deterministic)
    constants = aot_constants(group, head_dim, window, cache != dtype) | {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "SPLIT": config.split,
    }
    given = aot_signature(
        dtype, cache, ("q_stride", "out_stride", "table_stride", "block_stride")
    ) | {"first_seq": "i32", "num_seqs": "i32"}
    mode = "-deterministic" if deterministic else ""
    name = f"prefill-g{group}-d{head_dim}-w{window}-{dtype[1:]}-{cache[1:]}{mode}"
    return AotCase(
        name,
        prefill_kernel,
        given,
        constants,
        config.num_warps,
        config.num_stages,
        {"enable_fp_fusion": not deterministic},
    )


AOT = [
    *(_aot(*shape, "*bf16", "*bf16", False) for shape in _SHAPES),
    _aot(4, 128, 0, "*fp16", "*fp16", False),
    *(_aot(4, head_dim, 0, "*bf16", "*fp8e4nv", False) for head_dim in (64, 128, 256)),
    *(_aot(4, head_dim, 0, "*bf16", "*bf16", True) for head_dim in (64, 128, 256)),
    _aot(4, 128, 0, "*bf16", "*fp8e4nv", True),
]
