"""From one product's queries, keys and values to attention's inputs: normalise, rotate, store.

    q, k <- rms_norm(q), rms_norm(k)            per head, where the model asks (arXiv:2505.09388)
    (a, b) <- (a cos - b sin, b cos + a sin)    q and k; channels i and i + head_dim / 2 are a pair
    cache[slot of token] <- k, v                (RoFormer, arXiv:2104.09864)

Knows no frequencies.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from engine.kernels.attention.cpu import CpuAttentionPlan
from engine.kernels.attention.types import AttentionPlan, KVLayer
from engine.kernels.backend import uses_triton
from engine.kernels.pointwise.types import QKNorm, QKVHeads, Rotation


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """x [T, heads, head_dim] turned by each token's angles; a new tensor."""
    cos, sin = _angles(rotation)
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = x * cos
    out[..., :half].addcmul_(second, sin, value=-1)
    out[..., half:].addcmul_(first, sin)
    return out


def rotate_and_store(
    qkv: Tensor,
    heads: QKVHeads,
    norm: QKNorm | None,
    rotation: Rotation,
    plan: AttentionPlan,
    cache: KVLayer,
) -> Tensor:
    """qkv [T, (num_heads + 2 * num_kv_heads) * head_dim] -> queries [T, num_heads, head_dim], ready
    for `plan.attend`; the keys and values are in `cache`."""
    if uses_triton(qkv.device):
        from engine.kernels.pointwise import rotary_cache_triton

        return rotary_cache_triton.rotate_and_store(qkv, heads, norm, rotation, plan.slots, cache)
    if isinstance(plan, CpuAttentionPlan):
        cos, sin = _angles(rotation)
        return plan.rotate_and_store(qkv, heads.num_heads, cos, sin, norm, cache)
    each = qkv.view(qkv.shape[0], -1, heads.head_dim)
    # Queries and keys lie side by side, so one rotation turns both.
    num_qk = heads.num_heads + heads.num_kv_heads
    turned = rotate(_normalise(each[:, :num_qk], heads, norm), rotation)
    plan.write(turned[:, heads.num_heads :], each[:, num_qk:], cache)
    return turned[:, : heads.num_heads]


def _angles(rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Cosines and sines, a row for each token."""
    if rotation.positions is None:
        return rotation.cos, rotation.sin
    return rotation.cos[rotation.positions], rotation.sin[rotation.positions]


def _normalise(qk: Tensor, heads: QKVHeads, norm: QKNorm | None) -> Tensor:
    if norm is None:
        return qk
    size, count = (heads.head_dim,), heads.num_heads
    normed = qk.new_empty(qk.shape)
    normed[:, :count] = F.rms_norm(qk[:, :count], size, norm.q_weight, norm.eps)
    normed[:, count:] = F.rms_norm(qk[:, count:], size, norm.k_weight, norm.eps)
    return normed
