"""The processor's kernels against float64, over poison, on random steps and odd sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels.attention.cpu import CpuAttentionPlan
from engine.kernels.attention.dispatch import attention_planner
from engine.kernels.attention.reference import TorchAttentionPlan
from engine.kernels.attention.types import AttentionMetadata, AttentionShape, KVLayer
from engine.kernels.cpu import backend as cpu_backend
from engine.kernels.linear import cpu as cpu_linear
from engine.kernels.linear.dispatch import INT8_ROWS, pack_linear
from engine.kernels.linear.weights import quantise_int8
from engine.kernels.pointwise.cpu import argmax
from engine.kernels.pointwise.rms_norm import add_rms_norm, rms_norm
from engine.kernels.pointwise.rotary_cache import rotate_and_store
from engine.kernels.pointwise.swiglu import swiglu
from engine.kernels.pointwise.types import QKNorm, QKVHeads, Rotation
from tests.budget import examples
from tests.engine.kernels.attention_steps import Step, error, shape_of

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
DTYPES = list(TOLERANCE)

pytestmark = pytest.mark.skipif(
    not cpu_backend.uses_cpu_kernels(CPU), reason="numba or libgomp is not here"
)


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> None:
    torch.set_num_threads(request.param)


def relaid(step: Step) -> KVLayer:
    """The step's cache in the kernels' layout, what no token owns poisoned there as well."""
    shape = step.shape
    new = [torch.full_like(stored, torch.nan) for stored in (step.cache.k, step.cache.v)]
    cache = KVLayer(*new)
    for row, (count, total) in enumerate(step.seqs):
        first = 0 if step.window is None else max(0, total - count - step.window + 1)
        at = np.arange(first, total)
        table = step.metadata.block_tables[row : row + 1]
        blocks = torch.from_numpy(table[0][at // 16])
        tokens = AttentionMetadata(np.array([len(at)]), np.array([total]), table, 0)
        plan = CpuAttentionPlan(tokens, shape, None)
        plan.write(*(s[blocks, :, at % 16] for s in (step.cache.k, step.cache.v)), cache)
    return cache


def attended(step: Step, cache: KVLayer) -> Tensor:
    plan = attention_planner(step.shape)(step.metadata, step.shape, step.window)
    assert isinstance(plan, CpuAttentionPlan)
    return plan.attend(step.q, cache)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("heads, head_dim", [((9, 3), 64), ((4, 4), 32), ((26, 2), 96)])
def test_attention(
    dtype: torch.dtype, window: int | None, heads: tuple[int, int], head_dim: int
) -> None:
    shape = shape_of(heads, head_dim, CPU, dtype)
    seqs = [(1, 301), (1, 64), (1, 17), (1, 1), (40, 120), (13, 13), (2, 33)]
    step = Step(seqs, shape, window, 3)
    found = attended(step, relaid(step))
    assert error(found, step.exact()) < TOLERANCE[dtype]


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 80)), min_size=1, max_size=6),
    st.sampled_from(DTYPES),
    st.one_of(st.none(), st.integers(1, 60)),
    st.integers(0, 1000),
)
@settings(max_examples=examples(60), deadline=None)
def test_any_batch(
    drawn: list[tuple[int, int]], dtype: torch.dtype, window: int | None, seed: int
) -> None:
    """And each sequence gets the very bits that it gets alone."""
    seqs = sorted(((new, new + before) for new, before in drawn), key=lambda s: (s[0] > 1, -s[1]))
    step = Step(seqs, shape_of((6, 2), 32, CPU, dtype), window, seed)
    cache = relaid(step)
    found = attended(step, cache)
    assert error(found, step.exact()) < TOLERANCE[dtype]
    meta, row = step.metadata, 0
    for i, (new, total) in enumerate(seqs):
        table = meta.block_tables[i : i + 1, : -(-total // 16)]
        alone = AttentionMetadata(np.array([new]), np.array([total]), table, int(new == 1))
        plan = CpuAttentionPlan(alone, step.shape, window)
        assert torch.equal(plan.attend(step.q[row : row + new], cache), found[row : row + new])
        row += new


def test_a_prompt_in_chunks_is_a_prompt_at_once() -> None:
    shape = shape_of((4, 2), 64, CPU, torch.bfloat16)
    step = Step([(90, 90)], shape, None, 5)
    cache = relaid(step)
    whole = attended(step, cache)
    table = step.metadata.block_tables
    for first, last in ((0, 7), (7, 8), (8, 61), (61, 90)):
        lens, ends = np.array([last - first]), np.array([last])
        meta = AttentionMetadata(lens, ends, table, int(last - first == 1))
        part = CpuAttentionPlan(meta, shape, None).attend(step.q[first:last], cache)
        assert torch.equal(part, whole[first:last])


def test_what_is_not_a_number_stays_in_its_sequence() -> None:
    shape = shape_of((4, 2), 64, CPU, torch.bfloat16)
    step = Step([(1, 40), (1, 20), (30, 30)], shape, None, 6)
    cache = relaid(step)
    clean = attended(step, cache)
    block = step.metadata.block_tables[0, 1]
    cache.v[block] = torch.nan
    found = attended(step, cache)
    assert found[0].isnan().all()
    assert torch.equal(found[1:], clean[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_rotation_and_cache(dtype: torch.dtype, normed: bool) -> None:
    """Written and attended through the kernels, as through the reference."""
    torch.manual_seed(1)
    shape = shape_of((6, 2), 64, CPU, dtype)
    heads = QKVHeads(6, 2, 64)
    lens = np.array([1, 37, 20])
    meta = AttentionMetadata(lens, lens, np.array([[3, 0, 0], [0, 5, 1], [2, 4, 0]]), 1)
    qkv = torch.randn(58, 10 * 64).to(dtype)
    angle = torch.rand(58, 1, 32) * 6.28
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    rotation = Rotation(torch.cat((cos, cos), dim=-1), sin)
    norm = QKNorm(torch.rand(64).to(dtype), torch.rand(64).to(dtype), 1e-6) if normed else None
    wide = [t.float() for t in (rotation.cos, rotation.sin)]
    wide_norm = norm and QKNorm(norm.q_weight.float(), norm.k_weight.float(), norm.eps)
    exact_shape = shape_of((6, 2), 64, CPU)
    reference = TorchAttentionPlan(meta, exact_shape, None)
    caches = [_poisoned(exact_shape, 6), _poisoned(shape, 6)]
    exact_q = rotate_and_store(qkv.float(), heads, wide_norm, Rotation(*wide), reference, caches[0])
    exact = reference.attend(exact_q, caches[0]).double()
    plan = attention_planner(shape)(meta, shape, None)
    q = rotate_and_store(qkv.clone(), heads, norm, rotation, plan, caches[1])
    assert error(q, exact_q.double()) < TOLERANCE[dtype]
    assert error(plan.attend(q, caches[1]), exact) < 2 * TOLERANCE[dtype]


def _poisoned(shape: AttentionShape, num_blocks: int) -> KVLayer:
    size = (num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
    return KVLayer(*(torch.full(size, torch.nan, dtype=shape.dtype) for _ in range(2)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 11, 12, 25, 100, 200])
@pytest.mark.parametrize("size", [(32, 64), (70, 96), (5, 34)])
def test_products(dtype: torch.dtype, rows: int, size: tuple[int, int]) -> None:
    torch.manual_seed(rows)
    weight, bias = torch.randn(size).to(dtype), torch.randn(size[0]).to(dtype)
    x = torch.randn(rows, size[1] + 6).to(dtype)[:, : size[1]]
    assert cpu_linear.cpu_multiplies(dtype, size[1], CPU)
    exact = x.double() @ weight.double().t()
    product = pack_linear(weight, None)
    assert error(product(x), exact) < TOLERANCE[dtype]
    assert error(pack_linear(weight, bias)(x), exact + bias.double()) < TOLERANCE[dtype]
    # A row's result does not depend on the others, nor on how many there are.
    assert torch.equal(product(x[-1:]), product(x)[-1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("size", [(32, 64), (70, 96), (5, 34)])
def test_products_in_int8(dtype: torch.dtype, rows: int, size: tuple[int, int]) -> None:
    """Few rows meet int8, more the dense copy; both are the product of the same values."""
    torch.manual_seed(rows)
    weight = quantise_int8(torch.randn(size).to(dtype))
    bias = torch.randn(size[0]).to(dtype)
    x = torch.randn(rows, size[1] + 6).to(dtype)[:, : size[1]]
    exact = x.double() @ (weight.values.double() * weight.scale.double()[:, None]).t()
    product = pack_linear(weight, None)
    assert error(product(x), exact) < TOLERANCE[dtype]
    assert error(pack_linear(weight, bias)(x), exact + bias.double()) < TOLERANCE[dtype]
    if rows <= INT8_ROWS:
        assert torch.equal(product(x[-1:]), product(x)[-1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 70])
def test_norm_and_gate(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(rows)
    delta, residual, weight = (torch.randn(rows, 96).to(dtype) for _ in range(3))
    weight = weight[0]
    total = delta.double() + residual.double()
    exact = _normed(total, weight)
    assert error(rms_norm(residual, weight, 1e-5), _normed(residual, weight)) < TOLERANCE[dtype]
    assert error(add_rms_norm(delta, residual, weight, 1e-5), exact) < TOLERANCE[dtype]
    assert error(residual, total) < TOLERANCE[dtype]
    gate_up = torch.randn(rows, 192).to(dtype) * 20
    gate, up = gate_up.double().chunk(2, -1)
    assert error(swiglu(gate_up), torch.nn.functional.silu(gate) * up) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_of_extremes(dtype: torch.dtype) -> None:
    gate = torch.tensor([-3e38, -1e4, -89.0, -88.5, -88.0, -87.0, -20.0, 0.0] * 4).to(dtype)
    gate = torch.cat((gate, -gate))
    found = swiglu(torch.cat((gate, torch.ones_like(gate)))[None])
    assert error(found, torch.nn.functional.silu(gate.double())[None]) < TOLERANCE[dtype]


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


def test_what_is_not_a_number_passes_through() -> None:
    bad = torch.zeros(2, 32, dtype=torch.bfloat16)
    bad[1, 3] = torch.nan
    found = pack_linear(torch.ones(32, 32, dtype=torch.bfloat16), None)(bad)
    assert found[1].isnan().all() and (found[0] == 0).all()
    assert swiglu(bad)[1, 3].isnan() and rms_norm(bad, bad[0], 1e-5)[1].isnan().all()


def test_without_numba_the_reference_serves() -> None:
    """As on a machine where nobody installed it."""
    program = """
import sys
sys.modules["numba"] = None
import torch
import engine.kernels.cpu.backend as backend
from engine.kernels.linear.dispatch import INT8_ROWS, pack_linear
from engine.kernels.pointwise.rms_norm import rms_norm
x = torch.ones(3, 32)
assert not backend.uses_cpu_kernels(x.device)
assert torch.equal(pack_linear(torch.ones(4, 32), None)(x), torch.full((3, 4), 32.0))
assert torch.allclose(rms_norm(x, x[0], 1e-5), x)
"""
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True, env=dict(os.environ))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [16, 37, 512, 4099])
def test_the_first_of_the_largest(dtype: torch.dtype, vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(70, vocab).to(dtype)
    logits[::3] = logits[::3].round()  # many are equal
    logits[::7] -= 1000.0
    found = argmax(logits)
    assert found is not None
    largest = logits.float().amax(dim=1, keepdim=True)
    assert found.tolist() == [row.index(True) for row in (logits.float() == largest).tolist()]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 20, 36])
def test_a_row_that_is_not_finite_is_told(bad: float, place: int) -> None:
    logits = torch.randn(4, 37)
    wanted = logits.argmax(dim=1)
    logits[2, place] = bad
    wanted[2] = -1
    found = argmax(logits)
    assert found is not None and torch.equal(found, wanted)


def test_no_kernel_takes_what_it_cannot_read() -> None:
    assert argmax(torch.randn(4, 64).half()) is None
    assert argmax(torch.randn(4, 64)[:, ::2]) is None
    assert argmax(torch.randn(4, 8)) is None
