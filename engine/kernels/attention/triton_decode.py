"""Attention of sequences with one or a few new tokens over the paged cache, its keys split.

Knows no requests; reads a step's sizes on the device, so that a launch can stand in a CUDA graph.

A sequence's keys are cut into spans ("flash decoding"); each is summed by a program of its own,

    m_s = max_j x_j,   l_s = sum_j 2^(x_j - m_s),   a_s = sum_j 2^(x_j - m_s) v_j

with x = scale * log2(e) * <q, k>, and a second kernel merges the spans in their order:

    out = (sum_s 2^(m_s - m) a_s) / (sum_s 2^(m_s - m) l_s),   m = max_s m_s

All query heads that share a KV head, and all queries of the sequence (up to 8: speculation), are
rows of one tile, causal among themselves. A sequence of a single span is written at once and the
merging program leaves.

Grid: (KV heads, spans, sequences); programs of spans behind a sequence's end leave. The number of
spans comes from the device's size and from upper bounds; their length comes from the sequence's own
on the device, or, deterministic, it is a constant and spans begin at multiples of it.

Bytes: keys and values once, 2 * KV heads * head_dim elements a token, which is all that counts:
q, out and the partial sums (8 + 4 * head_dim a row and span) are small. The limit is the memory.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.aot import AotCase
from engine.kernels.attention.triton_prefill import (
    aot_constants,
    aot_signature,
    attend_span,
    load_queries,
    merge_weights,
    prefill_config,
    store_rows,
)
from engine.kernels.tuning import launch_config

MERGED_AT_ONCE = 8
"""Spans whose sums the merging kernel has in flight."""
WAVES = 2
"""Programs for each multiprocessor, where the batch alone has fewer."""
LONG_SPLIT = 4096
"""Keys of a sequence that one program takes, where the batch alone fills the device."""
MAX_SPLITS = 64


@triton.jit
def _spans(
    seq_len, num_queries, num_splits,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr, MIN_SPLIT: tl.constexpr,
):  # fmt: skip
    """First key seen, its tile, first span's begin, keys of a span, number of spans."""
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(seq_len - num_queries - WINDOW + 1, 0)
    first = first_key // BLOCK_N * BLOCK_N
    if SPLIT > 0:
        origin = first // SPLIT * SPLIT
        length = SPLIT
    else:
        origin = first
        length = tl.cdiv(tl.cdiv(seq_len - first, num_splits), BLOCK_N) * BLOCK_N
        length = tl.maximum(length, MIN_SPLIT)
    return first_key, first, origin, length, tl.cdiv(seq_len - origin, length)


@triton.jit
def decode_kernel(
    out_ptr, sums_ptr, peaks_ptr, q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
    query_start_ptr, seq_lens_ptr, block_tables_ptr,
    scale_log2, q_stride, out_stride, table_stride, block_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr,
    MIN_SPLIT: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    seq = tl.program_id(2)
    num_splits = tl.num_programs(1)
    row_start = tl.load(query_start_ptr + seq)
    num_queries = tl.load(query_start_ptr + seq + 1) - row_start
    seq_len = tl.load(seq_lens_ptr + seq)
    first_key, first, origin, length, spans = _spans(
        seq_len, num_queries, num_splits, BLOCK_N, WINDOW, SPLIT, MIN_SPLIT
    )
    # A padding sequence of a graph has no queries.
    if (split >= spans) | (num_queries == 0):
        return
    start = origin + split * length
    rows = tl.arange(0, BLOCK_M)
    query = tl.minimum(rows // GROUP, num_queries - 1)
    head = kv_head * GROUP + rows % GROUP
    valid = rows < num_queries * GROUP
    q = load_queries(q_ptr, row_start + query, head, valid, q_stride, HEAD_DIM, D)
    if SCALED:
        scale_log2 *= tl.load(k_scale_ptr + kv_head)
    m, total, acc = attend_span(
        q,
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.zeros([BLOCK_M, D], tl.float32),
        k_ptr + kv_head * BLOCK_SIZE * HEAD_DIM,
        v_ptr + kv_head * BLOCK_SIZE * HEAD_DIM,
        block_tables_ptr + seq.to(tl.int64) * table_stride,
        seq_len - num_queries + query,
        first_key,
        tl.maximum(start, first), tl.minimum(start + length, seq_len),
        scale_log2, block_stride, HEAD_DIM, D, BLOCK_SIZE, BLOCK_N, WINDOW, True
    )  # fmt: skip
    token = row_start + query
    if spans == 1:
        acc = acc / total[:, None]
        if SCALED:
            acc = acc * tl.load(v_scale_ptr + kv_head)
        store_rows(out_ptr, acc, token, head, valid, out_stride, HEAD_DIM, D)
    else:
        num_heads = tl.num_programs(0) * GROUP
        at = (token.to(tl.int64) * num_heads + head) * num_splits + split
        dims = tl.arange(0, D)
        inside = valid[:, None] & (dims < HEAD_DIM)[None, :]
        tl.store(sums_ptr + (at * HEAD_DIM)[:, None] + dims[None, :], acc, mask=inside)
        tl.store(peaks_ptr + at * 2, m, mask=valid)
        tl.store(peaks_ptr + at * 2 + 1, total, mask=valid)


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    out_ptr, sums_ptr, peaks_ptr, v_scale_ptr, query_start_ptr, seq_lens_ptr,
    num_splits, out_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, MIN_SPLIT: tl.constexpr, SCALED: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Grid: (query heads, queries of a sequence, sequences)."""
    head = tl.program_id(0)
    query = tl.program_id(1)
    seq = tl.program_id(2)
    row_start = tl.load(query_start_ptr + seq)
    num_queries = tl.load(query_start_ptr + seq + 1) - row_start
    seq_len = tl.load(seq_lens_ptr + seq)
    first_key, first, origin, length, spans = _spans(
        seq_len, num_queries, num_splits, BLOCK_N, WINDOW, SPLIT, MIN_SPLIT
    )
    if (query >= num_queries) | (spans == 1):
        return
    token = (row_start + query).to(tl.int64)
    at_first = (token * tl.num_programs(0) + head) * num_splits
    dims = tl.arange(0, D)
    m = float("-inf")
    total = 0.0
    acc = tl.zeros([D], tl.float32)
    for begin in tl.range(0, spans, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            span = begin + i
            real = span < spans
            at = at_first + span
            inside = (dims < HEAD_DIM) & real
            acc_span = tl.load(sums_ptr + at * HEAD_DIM + dims, mask=inside, other=0.0)
            m_span = tl.load(peaks_ptr + at * 2, mask=real, other=float("-inf"))
            total_span = tl.load(peaks_ptr + at * 2 + 1, mask=real, other=0.0)
            m, kept, added = merge_weights(m, m_span)
            total = total * kept + total_span * added
            acc = acc * kept + acc_span * added
    acc = acc / total
    if SCALED:
        acc = acc * tl.load(v_scale_ptr + head // GROUP)
    at = out_ptr + token * out_stride + head * HEAD_DIM + dims
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


class DecodeConfig(NamedTuple):
    block_m: int
    """Rows of a tile: at least queries times the heads of a group, and 16."""
    block_n: int
    """Keys of a tile."""
    num_warps: int
    num_stages: int
    num_splits: int
    """Spans that the grid has room for."""
    min_split: int
    """No span of fewer keys; a multiple of block_n."""
    split: int = 0
    """Keys of every span (deterministic), a multiple of block_n; 0 lets the length decide."""


def decode_config(
    group: int,
    head_dim: int,
    *,
    num_seqs: int,
    num_kv_heads: int,
    max_queries: int,
    max_seq_len: int,
    window: int | None,
    num_units: int,
    deterministic: bool,
) -> DecodeConfig:
    """Good for Hopper, unless the device has a table. num_units: its multiprocessors.

    A tile of 64 keys of 128 bf16 channels is 32 KiB: two stages of it in flight on each
    multiprocessor are more than the memory's latency times its bandwidth (23 KiB on an H200), and
    the sums' chain of dependent steps is paid a quarter as often as with 16 keys.
    """
    rows = triton.next_power_of_2(max_queries * group)
    if deterministic:
        same = prefill_config(group, head_dim, 1, deterministic=True)
        longest = max_seq_len if window is None else min(max_seq_len, window + max_queries)
        # A window that begins inside a span takes one more.
        num_splits = -(-longest // same.split) + (longest < max_seq_len)
        block_m = max(same.block_m, rows)
        return DecodeConfig(
            block_m,
            same.block_n,
            same.num_warps,
            same.num_stages,
            num_splits,
            same.split,
            same.split,
        )
    # The addresses wait for the block table, so that two tiles in flight take four stages and one.
    default = {"block_n": 32 if head_dim > 128 else 64, "num_warps": 4, "num_stages": 5}
    default |= {"waves": WAVES, "long_split": LONG_SPLIT}
    tuned = launch_config("decode_attention", f"d{head_dim}-m{max(16, rows)}", default)
    block_n = tuned["block_n"]
    longest = max_seq_len if window is None else min(max_seq_len, window + max_queries + block_n)
    wanted = -(-num_units * tuned["waves"] // (num_seqs * num_kv_heads))
    if wanted > 1:
        min_split, num_splits = block_n, min(wanted, MAX_SPLITS)
    else:
        # The batch fills the device, but one long sequence among short ones would end alone.
        min_split, num_splits = tuned["long_split"], MAX_SPLITS
    num_splits = max(1, min(num_splits, -(-longest // min_split)))
    return DecodeConfig(
        max(16, rows), block_n, tuned["num_warps"], tuned["num_stages"], num_splits, min_split
    )


def sums_size(num_rows: int, num_heads: int, head_dim: int, num_splits: int) -> int:
    """float32 numbers that the spans of `num_rows` tokens need between the kernels."""
    return num_rows * num_heads * num_splits * (head_dim + 2) if num_splits > 1 else 0


def _constants(
    cache: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    group: int,
    window: int | None,
    config: DecodeConfig,
) -> dict[str, int]:
    """Return the constants that both kernels are specialised for."""
    head_dim = cache[0].shape[-1]
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "D": triton.next_power_of_2(head_dim),
        "BLOCK_N": config.block_n,
        "WINDOW": window or 0,
        "SPLIT": config.split,
        "MIN_SPLIT": config.min_split,
        "SCALED": cache[2] is not None,
        # One compiler may fuse a product into a sum where another does not.
        "enable_fp_fusion": config.split == 0,
    }


def launch_decode(
    out: Tensor,
    q: Tensor,
    cache: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    sums: Tensor,
    *,
    scale_log2: float,
    num_seqs: int,
    max_queries: int,
    window: int | None,
    config: DecodeConfig,
) -> None:
    """Attention of sequences [0, num_seqs), of at most `max_queries` new tokens each, into their
    rows of `out` [T, heads * head_dim].

    q: [T, heads, head_dim], rows of any stride. cache: keys, values and their scales per head.
    sums: float32, `sums_size` of all rows that may be written.
    """
    k, v, k_scale, v_scale = cache
    _, kv_heads, block_size, head_dim = k.shape
    group = q.shape[1] // kv_heads
    assert q.stride(1) == head_dim and q.stride(2) == 1 and out.stride(1) == 1
    assert config.block_m >= max_queries * group
    num_sums = sums.numel() // (head_dim + 2) * head_dim
    sums, peaks = sums[:num_sums], sums[num_sums:]
    shape = _constants(cache, group, window, config)
    decode_kernel[(kv_heads, config.num_splits, num_seqs)](
        out, sums, peaks, q, k, v, k_scale, v_scale, query_start, seq_lens, block_tables,
        scale_log2, q.stride(0), out.stride(0), block_tables.stride(0), k.stride(0),
        BLOCK_SIZE=block_size, BLOCK_M=config.block_m, num_warps=config.num_warps,
        num_stages=config.num_stages, **shape,
    )  # fmt: skip
    if config.num_splits > 1:
        merge_kernel[(q.shape[1], max_queries, num_seqs)](
            out, sums, peaks, v_scale, query_start, seq_lens, config.num_splits, out.stride(0),
            AT_ONCE=MERGED_AT_ONCE, num_warps=1, num_stages=1, **shape,
        )  # fmt: skip


def _aot(
    group: int, head_dim: int, window: int, dtype: str, cache: str, queries: int, fixed: bool
) -> list[AotCase]:
    config = decode_config(
        group,
        head_dim,
        num_seqs=1,
        num_kv_heads=8,
        max_queries=queries,
        max_seq_len=8192,
        window=window or None,
        num_units=132,
        deterministic=fixed,
    )
    constants = aot_constants(group, head_dim, window, cache != dtype) | {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "SPLIT": config.split,
        "MIN_SPLIT": config.min_split,
        "AT_ONCE": MERGED_AT_ONCE,
    }
    integers = ("q_stride", "out_stride", "table_stride", "block_stride")
    given = aot_signature(dtype, cache, integers)
    given |= {"sums_ptr": "*fp32", "peaks_ptr": "*fp32", "num_splits": "i32"}
    mode = "-deterministic" if fixed else ""
    name = f"g{group}-q{queries}-d{head_dim}-w{window}-{dtype[1:]}-{cache[1:]}{mode}"

    def case(kind: str, kernel: Any, num_warps: int, num_stages: int) -> AotCase:
        used = {key: value for key, value in constants.items() if key in kernel.arg_names}
        signature = {key: given[key] for key in kernel.arg_names if key in given}
        options = {"enable_fp_fusion": not fixed}
        return AotCase(f"{kind}-{name}", kernel, signature, used, num_warps, num_stages, options)

    return [
        case("decode", decode_kernel, config.num_warps, config.num_stages),
        case("merge", merge_kernel, 1, 1),
    ]


_SHAPES = (
    # group, head_dim, window, dtype, cache, queries, deterministic
    (4, 128, 0, "*bf16", "*bf16", 1, False),  # Llama 3, Mistral, Qwen3
    (4, 128, 4096, "*bf16", "*bf16", 1, False),
    (7, 128, 0, "*bf16", "*bf16", 1, False),  # Qwen2.5 7B
    (8, 128, 0, "*bf16", "*bf16", 8, False),
    (4, 128, 0, "*bf16", "*bf16", 8, False),
    (3, 64, 0, "*bf16", "*bf16", 1, False),  # SmolLM2
    (1, 80, 0, "*bf16", "*bf16", 1, False),
    (1, 96, 0, "*bf16", "*bf16", 1, False),
    (4, 256, 0, "*bf16", "*bf16", 1, False),
    (4, 128, 0, "*fp16", "*fp16", 1, False),
    (4, 64, 0, "*bf16", "*fp8e4nv", 1, False),
    (4, 128, 0, "*bf16", "*fp8e4nv", 1, False),
    (4, 256, 0, "*bf16", "*fp8e4nv", 1, False),
    (4, 64, 0, "*bf16", "*bf16", 1, True),
    (4, 128, 0, "*bf16", "*bf16", 1, True),
    (4, 256, 0, "*bf16", "*bf16", 1, True),
    (4, 128, 0, "*bf16", "*fp8e4nv", 1, True),
)
AOT = [case for shape in _SHAPES for case in _aot(*shape)]
