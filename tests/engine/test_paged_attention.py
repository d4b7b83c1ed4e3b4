"""The reference's float8 cache, and the counts that a roofline needs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.gpu.paged_steps import attention_bytes, attention_flops
from engine.kernels.attention.reference import TorchAttentionPlan
from engine.kernels.attention.types import AttentionMetadata
from engine.runner.memory.kv_cache import allocate_kv_cache, kv_bytes_per_token
from tests.engine.kernels.attention_steps import Step, error, shape_of

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("cache", [None, FP8])
def test_the_reference_is_exact(window: int | None, cache: torch.dtype | None) -> None:
    shape = shape_of((6, 2), 32, CPU, cache_dtype=cache)
    step = Step([(1, 200), (1, 40), (1, 1), (50, 120), (2, 2)], shape, window, 0)
    plan = TorchAttentionPlan(step.metadata, shape, window)
    assert error(plan.attend(step.q, step.cache), step.exact()) < 1e-5


def test_a_float8_cache_keeps_what_is_written_to_three_bits() -> None:
    """Divided by the head's scale, so that large values fit; beyond them the largest is kept."""
    shape = shape_of((4, 2), 32, CPU, cache_dtype=FP8)
    metadata = AttentionMetadata(
        np.array([1, 20]), np.array([5, 20]), np.array([[2, 0], [1, 3]]), 1
    )
    (layer,) = allocate_kv_cache(shape, 1, 4)
    assert layer.k.dtype == FP8 and layer.k_scale is not None and layer.v_scale is not None
    layer.k_scale.copy_(torch.tensor([1.0, 4.0]))
    k, v = torch.randn(2, 21, 2, 32) * 100
    k[3, 1, 7], k[3, 0, 7] = 1500.0, 1500.0
    plan = TorchAttentionPlan(metadata, shape, None)
    plan.write(k, v, layer)
    rows = plan.slots
    for new, stored, scale in ((k, layer.k, layer.k_scale), (v, layer.v, layer.v_scale)):
        found = stored[rows // 16, :, rows % 16].float() * scale[:, None]
        limit = 448.0 * scale[:, None]
        assert torch.allclose(found, new.clamp(-limit, limit), rtol=1 / 16, atol=0.02)
    assert layer.k[rows[3] // 16, 1, rows[3] % 16, 7].float() * 4 == 1536  # 3 bits of 1500
    assert layer.k[rows[3] // 16, 0, rows[3] % 16, 7].float() == 448


def test_a_float8_cache_takes_half_of_a_half() -> None:
    half = kv_bytes_per_token(shape_of((8, 2), 64, CPU, torch.bfloat16), 3)
    assert half == 3 * 2 * 2 * 64 * 2
    assert kv_bytes_per_token(shape_of((8, 2), 64, CPU, torch.bfloat16, FP8), 3) == half // 2


def test_what_a_step_must_compute_and_move() -> None:
    """One decode over 100 keys and a chunk of 3 behind 10, counted by hand."""
    shape = shape_of((8, 2), 64, CPU, torch.bfloat16)
    metadata = AttentionMetadata(np.array([1, 3]), np.array([100, 13]), np.zeros((2, 7), int), 1)
    assert attention_flops(metadata, shape, None) == 4 * 8 * 64 * (100 + 11 + 12 + 13)
    assert attention_bytes(metadata, shape, None) == 64 * 2 * (2 * 2 * 113 + 2 * 8 * 4)
    assert attention_flops(metadata, shape, 12) == 4 * 8 * 64 * (12 + 11 + 12 + 12)
    assert attention_bytes(metadata, shape, 12) == 64 * 2 * (2 * 2 * (12 + 13) + 2 * 8 * 4)
    scaled = shape_of((8, 2), 64, CPU, torch.bfloat16, FP8)
    assert attention_bytes(metadata, scaled, None) == 64 * (2 * 2 * 113 + 2 * 2 * 8 * 4)
