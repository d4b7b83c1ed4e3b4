"""Norms, gate, embedding, rotation into the cache: against float64, on the sizes of served models.

Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu.checks.check_attention import FP8, HEADS
from bench.gpu.findings import LIMITS, Finding, differing, poisoned, relative
from bench.gpu.place import Place
from engine.kernels.attention.types import AttentionPlan, KVLayer
from engine.kernels.pointwise.embedding import gather_rows
from engine.kernels.pointwise.rms_norm import add_rms_norm, rms_norm
from engine.kernels.pointwise.rotary_cache import rotate_and_store
from engine.kernels.pointwise.swiglu import swiglu
from engine.kernels.pointwise.types import QKNorm, QKVHeads, Rotation

BLOCK_SIZE = 16
FP8_LIMIT, FP8_LIMIT_INTERPRETED = 4e-2, 0.2
"""The tolerance of values stored with 3 bits of mantissa; the interpreter loses a carry into the
exponent."""


def _dtypes(place: Place) -> tuple[torch.dtype, ...]:
    return place.pick((torch.float32, torch.float16, torch.bfloat16), (torch.float16,))


def norms(place: Place) -> Iterator[Finding]:
    for dtype in _dtypes(place):
        for rows, size in place.pick(((1, 4096), (257, 4096), (33, 2880), (5, 16_384)), ((3, 72),)):
            x = place.randn(rows, size, seed=rows, dtype=dtype)
            delta = place.randn(rows, size, seed=rows + 1, dtype=dtype)
            weight = 1 + 0.3 * place.randn(size, seed=size)
            weight = weight.to(dtype)
            case = f"{rows} x {size} {str(dtype)[6:]}"
            with poisoned():
                found = rms_norm(x, weight, 1e-5)
            yield Finding(f"alone {case}", relative(found, _normed(x, weight)), LIMITS[dtype])
            total = x + delta
            with poisoned():
                found = add_rms_norm(delta, x, weight, 1e-5)
            yield Finding(f"sum {case}", differing(x, total), 0.0)
            error = relative(found, _normed(total, weight))
            yield Finding(f"after a sum {case}", error, LIMITS[dtype])


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


def gate(place: Place) -> Iterator[Finding]:
    for dtype in _dtypes(place):
        for rows, size in place.pick(((1, 14_336), (130, 14_336), (7, 1111)), ((3, 40),)):
            x = place.randn(rows, 2 * size, seed=rows, dtype=dtype) * 3
            with poisoned():
                found = swiglu(x)
            first, second = x.double().chunk(2, dim=-1)
            exact = first * torch.sigmoid(first) * second
            yield Finding(
                f"{rows} x {size} {str(dtype)[6:]}", relative(found, exact), LIMITS[dtype]
            )


def embedding(place: Place) -> Iterator[Finding]:
    rows, size = place.pick((128_256, 4096), (130, 24))
    table = place.randn(rows, size, seed=1, dtype=place.half)
    ids = torch.randint(rows, (777,), generator=place.generator(2), device=place.device)
    with poisoned():
        found = gather_rows(ids, table)
    yield Finding("whole", differing(found, table[ids]), 0.0)
    first = rows // 2
    with poisoned():
        found = gather_rows(ids, table[first:].contiguous(), first)
    wanted = torch.where((ids >= first)[:, None], table[ids], torch.zeros_like(table[ids]))
    yield Finding("a rank's half", float((found != wanted).sum()), 0.0)


@dataclass
class _Slots(AttentionPlan):
    """As much of a plan as the rotation asks for."""

    given: Tensor

    @property
    def slots(self) -> Tensor:
        return self.given

    def write(self, k: Tensor, v: Tensor, cache: KVLayer) -> None:
        raise AssertionError("the kernel writes itself")

    def attend(self, q: Tensor, cache: KVLayer) -> Tensor:
        raise AssertionError("nobody attends here")


def rotation(place: Place) -> Iterator[Finding]:
    for head_dim, heads in HEADS.items():
        for norm in (False, True):
            for cache in (None, FP8):
                if place.tiny and head_dim not in (64, 80):
                    continue
                own = (3, 1) if place.tiny else heads
                yield from _rotation(place, head_dim, own, norm, cache)


def _rotation(
    place: Place, head_dim: int, heads: tuple[int, int], norm: bool, cache: torch.dtype | None
) -> Iterator[Finding]:
    tokens, num_blocks, dtype = place.pick(333, 5), place.pick(64, 4), place.half
    num_heads, num_kv_heads = heads
    qkv = place.randn(tokens, (num_heads + 2 * num_kv_heads) * head_dim, seed=head_dim, dtype=dtype)
    weights = [(1 + 0.3 * place.randn(head_dim, seed=i)).to(dtype) for i in (1, 2)]
    positions = torch.randint(
        place.pick(100_000, 60), (tokens,), generator=place.generator(3), device=place.device
    )
    angles = _angles(place, head_dim)
    slots = torch.randperm(num_blocks * BLOCK_SIZE, generator=torch.Generator().manual_seed(4))
    slots = slots[:tokens].to(place.device)
    slots[1] = -1  # a token of which nothing is kept
    size = (num_blocks, num_kv_heads, BLOCK_SIZE, head_dim)
    stored = [torch.zeros(size, dtype=cache or dtype, device=place.device) for _ in range(2)]
    scales: list[Tensor | None] = [None, None]
    if cache is not None:
        drawn = torch.rand(2, num_kv_heads, generator=place.generator(5), device=place.device)
        scales = list(drawn * 0.05 + 0.01)
    layer = KVLayer(stored[0], stored[1], scales[0], scales[1])
    qk_norm = QKNorm(weights[0], weights[1], 1e-6) if norm else None
    layout = QKVHeads(num_heads, num_kv_heads, head_dim)
    with poisoned():
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        turned = Rotation(torch.cat((cos, cos), -1), sin, positions)
        found = rotate_and_store(qkv.clone(), layout, qk_norm, turned, _Slots(slots), layer)
    wanted = _rotated(qkv, heads, head_dim, weights if norm else None, turned)
    case = f"d{head_dim}{' normed' if norm else ''} {str(cache or dtype)[6:]}"
    split = (num_heads, num_kv_heads, num_kv_heads)
    q, k, v = wanted.split(split, dim=1)
    yield Finding(f"{case} queries", relative(found.reshape(q.shape), q), LIMITS[dtype])
    kept = slots >= 0
    rounding = place.pick(FP8_LIMIT, FP8_LIMIT_INTERPRETED)
    limit = LIMITS[dtype] if cache is None else rounding
    for name, tensor, scale, exact in (
        ("keys", layer.k, layer.k_scale, k),
        ("values", layer.v, layer.v_scale, v),
    ):
        raw = tensor.view(torch.uint8)[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE]
        rows = raw.view(tensor.dtype).double()
        rows = rows if scale is None else rows * scale.double()[:, None]
        yield Finding(f"{case} {name}", relative(rows[kept], exact[kept]), limit)
        written = tensor.view(torch.uint8).flatten(-1).any(-1).sum()
        beside = float(written) - int(kept.sum()) * num_kv_heads
        yield Finding(f"{case} {name} elsewhere", abs(beside), 0.0)


def _angles(place: Place, head_dim: int) -> Tensor:
    """float32 [positions, 1, head_dim / 2]"""
    half = torch.arange(0, head_dim, 2, device=place.device) / head_dim
    position = torch.arange(place.pick(100_000, 60), device=place.device)
    return position[:, None, None].float() * (1 / 500_000.0**half)


def _rotated(
    qkv: Tensor,
    heads: tuple[int, int],
    head_dim: int,
    weights: list[Tensor] | None,
    rotation: Rotation,
) -> Tensor:
    """float64 [T, heads + 2 * kv_heads, head_dim]: queries, keys, values."""
    each = qkv.double().view(len(qkv), -1, head_dim)
    num_heads, num_kv_heads = heads
    qk, v = each[:, : num_heads + num_kv_heads], each[:, num_heads + num_kv_heads :]
    if weights is not None:
        q, k = qk[:, :num_heads], qk[:, num_heads:]
        qk = torch.cat(
            [
                x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
                for x, weight in zip((q, k), weights, strict=True)
            ],
            dim=1,
        )
    assert rotation.positions is not None
    half = head_dim // 2
    cos = rotation.cos[rotation.positions].double()[..., :half]
    sin = rotation.sin[rotation.positions].double()
    a, b = qk[..., :half], qk[..., half:]
    return torch.cat([torch.cat([a * cos - b * sin, b * cos + a * sin], -1), v], dim=1)


CHECKS = {"norms": norms, "gate": gate, "embedding": embedding, "rotation into the cache": rotation}
