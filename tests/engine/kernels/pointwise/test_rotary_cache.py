"""Norm, rotation and the write to the paged cache against float64 and plain loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels.attention.types import KVLayer
from engine.kernels.pointwise import rotary_cache_triton
from engine.kernels.pointwise.rotary_cache import rotate
from engine.kernels.pointwise.types import QKNorm, QKVHeads, Rotation
from engine.layers.rotary import RotaryEmbedding, inverse_frequencies
from tests.budget import examples

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
MAX_POSITIONS, BLOCK_SIZE, NUM_BLOCKS = 40, 4, 9
EPS = 1e-6
ATTENTION_FACTOR = 1.25


def reference(
    qkv: Tensor, heads: QKVHeads, norm: QKNorm | None, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in float64, [T, heads, head_dim] each."""
    count, kv, dim = heads
    each = qkv.double().cpu().view(len(qkv), -1, dim)
    q, k, v = each[:, :count], each[:, count : count + kv], each[:, count + kv :]
    if norm is not None:
        q = q * (q.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.q_weight.double()
        k = k * (k.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.k_weight.double()
    angle = positions[:, None] * inverse_frequencies(dim, 100.0, None).double()
    turn = torch.polar(torch.full_like(angle, ATTENTION_FACTOR), angle)[:, None]

    def turned(x: Tensor) -> Tensor:
        pairs = torch.complex(x[..., : dim // 2], x[..., dim // 2 :]) * turn
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    return turned(q), turned(k), v


def rotation(
    dim: int,
    positions: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    attention_factor: float = ATTENTION_FACTOR,
) -> Rotation:
    frequency = inverse_frequencies(dim, 100.0, None).to(device)
    embedding = RotaryEmbedding(frequency, dtype, MAX_POSITIONS, attention_factor=attention_factor)
    made = embedding(positions)
    assert made.positions is not None and len(made.cos) == MAX_POSITIONS, "a table is looked up"
    return made


def error(out: Tensor, wanted: Tensor) -> float:
    return float((out.double().cpu() - wanted).norm() / wanted.norm())


def run(
    heads: QKVHeads,
    slots: list[int],
    *,
    with_norm: bool,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    in_place: bool = False,
) -> None:
    """One call with random products; the cache and the output start as NaN."""
    generator = torch.Generator().manual_seed(seed)
    count, kv, dim = heads
    tokens = len(slots)
    qkv = torch.randn(tokens, (count + 2 * kv) * dim, generator=generator).to(device, dtype)
    positions = torch.randint(0, MAX_POSITIONS, (tokens,), generator=generator)
    norm = None
    if with_norm:
        weights = torch.randn(2, dim, generator=generator).to(device, dtype)
        norm = QKNorm(weights[0], weights[1], EPS)
    q, k, v = reference(qkv, heads, norm, positions)
    size = (NUM_BLOCKS, kv, BLOCK_SIZE, dim)
    cache = KVLayer(*torch.full((2, *size), torch.nan, device=device, dtype=dtype))
    out = qkv[:, : count * dim].view(tokens, count, dim)
    if not in_place:
        out = torch.full_like(out, torch.nan)
    turned = rotary_cache_triton.rotate_and_store(
        qkv,
        heads,
        norm,
        rotation(dim, positions.to(device), dtype, device),
        torch.tensor(slots, device=device),
        cache,
        out,
    )
    assert turned is out and error(out, q) < TOLERANCE[dtype]
    for stored, wanted in ((cache.k, k), (cache.v, v)):
        rows = stored.permute(0, 2, 1, 3).reshape(NUM_BLOCKS * BLOCK_SIZE, kv, dim)
        kept = [i for i, slot in enumerate(slots) if slot >= 0]
        if kept:
            assert error(rows[[slots[i] for i in kept]], wanted[kept]) < TOLERANCE[dtype]
        untouched = sorted(set(range(NUM_BLOCKS * BLOCK_SIZE)) - set(slots))
        assert rows[untouched].isnan().all(), "a slot was written that nobody named"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(
    "heads",
    [(1, 1, 2), (9, 3, 64), (5, 5, 80), (4, 1, 96), (7, 1, 128), (2, 1, 256)],
    ids=str,
)
def test_heads(
    heads: tuple[int, int, int], with_norm: bool, dtype: torch.dtype, device: torch.device
) -> None:
    slots = [5, -1, 35, 0]
    run(QKVHeads(*heads), slots, with_norm=with_norm, dtype=dtype, device=device, seed=sum(heads))


def test_queries_may_stay_where_they_are(device: torch.device) -> None:
    heads = QKVHeads(6, 2, 16)
    run(heads, [3, 4], with_norm=True, dtype=torch.float32, device=device, seed=1, in_place=True)


@given(
    slots=st.lists(st.integers(0, NUM_BLOCKS * BLOCK_SIZE - 1), unique=True, max_size=6),
    padding=st.integers(0, 3),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=examples(15), deadline=None)
def test_any_slots(slots: list[int], padding: int, seed: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if slots or padding:
        run(
            QKVHeads(3, 1, 8),
            slots + [-1] * padding,
            with_norm=False,
            dtype=torch.float32,
            device=device,
            seed=seed,
        )


def test_a_float8_cache(device: torch.device) -> None:
    """Divided by the head's scale; beyond the range the largest, and NaN stays NaN. The values are
    such that nothing is rounded: the interpreter loses a carry into the exponent, and NaN."""
    heads, slots = QKVHeads(2, 2, 16), [0, 7, -1, 13]
    exact = torch.randn(4, 6, 16, device=device).mul(60).to(torch.float8_e4m3fn).float()
    scales = torch.tensor([[0.25, 8.0], [2.0, 1.0]], device=device)
    qkv = exact.clone()
    qkv[:, 2:] *= scales.view(4, 1)
    qkv[1, 4, 0], exact[1, 4, 0] = -1e6, -448
    if device.type == "cuda":
        qkv[3, 5, 15] = exact[3, 5, 15] = torch.nan
    stored = torch.zeros(2, NUM_BLOCKS, 2, BLOCK_SIZE, 16, device=device).to(torch.float8_e4m3fn)
    cache = KVLayer(stored[0], stored[1], scales[0], scales[1])
    start = torch.zeros(4, dtype=torch.int64, device=device)
    angles = rotation(16, start, torch.float32, device, attention_factor=1.0)
    at = torch.tensor(slots, device=device)
    out = rotary_cache_triton.rotate_and_store(qkv.view(4, 96), heads, None, angles, at, cache)
    assert torch.equal(out, exact[:, :2])
    written = stored.float().permute(0, 1, 3, 2, 4).reshape(2, NUM_BLOCKS * BLOCK_SIZE, 2, 16)
    wanted = torch.zeros_like(written)
    wanted[:, [0, 7, 13]] = exact[[0, 1, 3], 2:].view(3, 2, 2, 16).transpose(0, 1)
    torch.testing.assert_close(written, wanted, rtol=0, atol=0, equal_nan=True)


def test_the_table_turns_as_the_angles_do(device: torch.device) -> None:
    positions = torch.tensor([0, 5, 39], device=device)
    looked_up = rotation(32, positions, torch.float32, device)
    x = torch.randn(3, 2, 32, device=device)
    rows = Rotation(looked_up.cos[positions], looked_up.sin[positions])
    assert torch.equal(rotate(x, looked_up), rotate(x, rows))
