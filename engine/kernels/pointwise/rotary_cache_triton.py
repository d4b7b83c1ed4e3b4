"""Per-head norm, rotation and the write to the paged cache in one pass over a step's products.

Grid (T, heads / HEADS_PER_PROGRAM) over queries, keys and values alike; all in float32 and rounded
once. Bytes: the product read, queries written, keys and values written to their slots (half the
bytes where the cache is float8_e4m3fn, divided by each head's scale); the table of angles is shared
by all heads and layers and stays in the cache. A slot of -1 is padding: nothing is stored.

A slot is block * block_size + offset; the row of head h in [num_blocks, num_kv_heads, block_size]
is (block * num_kv_heads + h) * block_size + offset, in 64 bits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.aot import AotCase
from engine.kernels.attention.types import KVLayer
from engine.kernels.pointwise.types import QKNorm, QKVHeads, Rotation
from engine.kernels.tuning import launch_config

FP8 = torch.float8_e4m3fn


@triton.jit
def _norm_weight(q_ptr, k_ptr, is_query, channel, mask):
    """[heads, channels]: the weights of queries or keys, row by row."""
    q = tl.load(q_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    return tl.where(is_query[:, None], q[None, :], k[None, :])


@triton.jit
def _store_rows(cache_ptr, scale_ptr, first, second, kv_head, row, mask, HALF: tl.constexpr,
                HALF_BLOCK: tl.constexpr, QUANTISED: tl.constexpr):  # fmt: skip
    """Both halves [heads, HALF_BLOCK] to rows [heads] of the cache viewed [-1, 2 * HALF]."""
    if QUANTISED:
        head_mask = (kv_head >= 0) & (row >= 0)
        scale = tl.load(scale_ptr + kv_head, mask=head_mask & (tl.max(mask.to(tl.int32), 1) > 0),
                        other=1.0)[:, None]  # fmt: skip
        first = tl.clamp(first / scale, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        second = tl.clamp(second / scale, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    at = cache_ptr + row[:, None] * (2 * HALF) + tl.arange(0, HALF_BLOCK)[None, :]
    tl.store(at, first.to(cache_ptr.dtype.element_ty), mask=mask)
    tl.store(at + HALF, second.to(cache_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rotary_cache_kernel(
    qkv_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, out_ptr, k_cache_ptr, v_cache_ptr,
    k_scale_ptr, v_scale_ptr, q_norm_ptr, k_norm_ptr, eps, out_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr, NORM: tl.constexpr,
    QUANTISED: tl.constexpr,
):  # fmt: skip
    """qkv contiguous [T, (HEADS + 2 * KV_HEADS) * 2 * HALF]; out [T, HEADS * 2 * HALF], its tokens
    `out_stride` apart, may be the queries of qkv; cos rows 2 * HALF long, sin rows HALF."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)
    pair = tl.arange(0, HALF_BLOCK)
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & (pair < HALF)[None, :]
    of_token = qkv_ptr + token * ((HEADS + 2 * KV_HEADS) * 2 * HALF)
    at = of_token + head[:, None] * (2 * HALF) + pair[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    a, b = first, second
    if NORM:
        squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        a *= scale * _norm_weight(q_norm_ptr, k_norm_ptr, is_query, pair, pair < HALF)
        b *= scale * _norm_weight(q_norm_ptr, k_norm_ptr, is_query, pair + HALF, pair < HALF)
    position = tl.load(positions_ptr + token)
    cos = tl.load(cos_ptr + position * (2 * HALF) + pair, mask=pair < HALF, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + pair, mask=pair < HALF, other=0.0)
    cos, sin = cos.to(tl.float32)[None, :], sin.to(tl.float32)[None, :]
    first = tl.where(is_value[:, None], first, a * cos - b * sin)
    second = tl.where(is_value[:, None], second, b * cos + a * sin)
    out = out_ptr + token * out_stride + head[:, None] * (2 * HALF) + pair[None, :]
    queries = inside & is_query[:, None]
    tl.store(out, first.to(out_ptr.dtype.element_ty), mask=queries)
    tl.store(out + HALF, second.to(out_ptr.dtype.element_ty), mask=queries)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    kv_head = tl.where(is_value, head - HEADS - KV_HEADS, head - HEADS)
    row = ((slot // BLOCK_SIZE) * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
    kept = inside & (slot >= 0)
    keys, values = kept & (~is_query & ~is_value)[:, None], kept & is_value[:, None]
    _store_rows(k_cache_ptr, k_scale_ptr, first, second, kv_head, row, keys, HALF, HALF_BLOCK,
                QUANTISED)  # fmt: skip
    _store_rows(v_cache_ptr, v_scale_ptr, first, second, kv_head, row, values, HALF, HALF_BLOCK,
                QUANTISED)  # fmt: skip


def rotate_and_store(
    qkv: Tensor,
    heads: QKVHeads,
    norm: QKNorm | None,
    rotation: Rotation,
    slots: Tensor,
    cache: KVLayer,
    out: Tensor | None = None,
) -> Tensor:
    """Do what `rotary_cache.rotate_and_store` does. slots: int64 [T]. out: [T, num_heads,
    head_dim], each token contiguous; the queries in `qkv` themselves may be given."""
    num_tokens = qkv.shape[0]
    num_heads, num_kv_heads, head_dim = heads
    if out is None:
        out = qkv.new_empty(num_tokens, num_heads, head_dim)
    assert qkv.is_contiguous() and cache.k.is_contiguous() and cache.v.is_contiguous()
    assert rotation.positions is not None and rotation.positions.shape[0] == num_tokens
    assert out.stride()[1:] == (head_dim, 1)
    quantised = cache.k.dtype == FP8
    assert not quantised or (cache.k_scale is not None and cache.v_scale is not None)
    if num_tokens == 0:
        return out
    config = launch_config(
        "rotary_cache", f"dim{head_dim}", {"HEADS_PER_PROGRAM": 8, "num_warps": 4}
    )
    total = num_heads + 2 * num_kv_heads
    grid = (num_tokens, triton.cdiv(total, config["HEADS_PER_PROGRAM"]))
    half = head_dim // 2
    _rotary_cache_kernel[grid](
        qkv, rotation.cos, rotation.sin, rotation.positions, slots, out, cache.k, cache.v,
        cache.k_scale if quantised else qkv, cache.v_scale if quantised else qkv,
        qkv if norm is None else norm.q_weight, qkv if norm is None else norm.k_weight,
        0.0 if norm is None else norm.eps, out.stride(0), HEADS=num_heads, KV_HEADS=num_kv_heads,
        HALF=half, HALF_BLOCK=triton.next_power_of_2(half), BLOCK_SIZE=cache.k.shape[2],
        NORM=norm is not None, QUANTISED=quantised, **config,
    )  # fmt: skip
    return out


def _aot(head_dim: int, num_heads: int, num_kv_heads: int, dtype: str, cache: str,
         norm: bool) -> AotCase:  # fmt: skip
    of_dtype = ("qkv", "cos", "sin", "out", "q_norm", "k_norm")
    kinds = dict.fromkeys(of_dtype, f"*{dtype}")
    kinds |= dict.fromkeys(("positions", "slots"), "*i64")
    kinds |= dict.fromkeys(("k_cache", "v_cache"), f"*{cache}")
    kinds |= dict.fromkeys(("k_scale", "v_scale"), "*fp32")
    constexprs = {
        "HEADS": num_heads,
        "KV_HEADS": num_kv_heads,
        "HALF": head_dim // 2,
        "HALF_BLOCK": triton.next_power_of_2(head_dim // 2),
        "BLOCK_SIZE": 16,
        "HEADS_PER_PROGRAM": 8,
        "NORM": norm,
        "QUANTISED": cache == "fp8e4nv",
    }
    signature = {f"{name}_ptr": kind for name, kind in kinds.items()}
    signature |= {"eps": "fp32", "out_stride": "i32:16"}
    return AotCase(
        name=f"rotary_cache {head_dim} {num_heads}:{num_kv_heads} {dtype}->{cache} norm={norm}",
        kernel=_rotary_cache_kernel,
        signature=signature,
        constexprs=constexprs,
    )


AOT = [
    _aot(64, 9, 3, "bf16", "bf16", False),
    _aot(80, 32, 32, "bf16", "bf16", False),
    _aot(96, 32, 8, "bf16", "bf16", False),
    _aot(128, 32, 8, "bf16", "bf16", False),
    _aot(128, 32, 8, "bf16", "bf16", True),
    _aot(128, 32, 8, "bf16", "fp8e4nv", False),
    _aot(128, 32, 8, "bf16", "fp8e4nv", True),
    _aot(128, 32, 8, "fp16", "fp16", True),
    _aot(128, 32, 8, "fp32", "fp32", True),
    _aot(256, 16, 4, "bf16", "bf16", False),
]
