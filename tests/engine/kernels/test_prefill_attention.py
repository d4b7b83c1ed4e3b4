"""Attention of prompt chunks: any cut, any group, any head, windows and scaled caches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.kernels.attention import triton_prefill as prefill
from tests.budget import examples
from tests.engine.kernels.attention_steps import TOLERANCE, Step, error, shape_of


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_head_dim(device: torch.device, head_dim: int, dtype: torch.dtype, seed: int) -> None:
    step = Step([(40, 40), (7, 90), (2, 19)], shape_of((2, 1), head_dim, device, dtype), None, seed)
    assert error(step.run(), step.exact()) < TOLERANCE[dtype]


@pytest.mark.parametrize("heads", [(3, 1), (7, 1), (4, 4), (9, 3), (16, 1)])
def test_every_group(device: torch.device, heads: tuple[int, int]) -> None:
    """The queries of a tile are as many as fit, and the rest of its rows write nothing."""
    step = Step([(70, 75), (2, 2)], shape_of(heads, 64, device), None, 1)
    assert error(step.run(), step.exact()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("window", [1, 5, 32, 33, 100, 1000])
@pytest.mark.parametrize("deterministic", [False, True])
def test_windows(
    device: torch.device, window: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "DETERMINISTIC_SPLIT", 64)
    shape = shape_of((4, 2), 64, device, deterministic=deterministic)
    step = Step([(90, 230), (3, 150)], shape, window, 2)
    assert error(step.run(), step.exact()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_scaled_float8_cache(device: torch.device, deterministic: bool) -> None:
    shape = shape_of(
        (4, 2), 64, device, torch.float16, torch.float8_e4m3fn, deterministic=deterministic
    )
    step = Step([(20, 100), (3, 50)], shape, None, 3)
    assert error(step.run(), step.exact()) < TOLERANCE[torch.float16]


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn])
def test_bfloat16(device: torch.device, head_dim: int, cache: torch.dtype) -> None:
    """Wrong in the interpreter, so only where there is a GPU."""
    if device.type != "cuda":
        pytest.skip("no GPU")
    shape = shape_of((8, 2), head_dim, device, torch.bfloat16, cache)
    step = Step([(1, 700), (300, 900), (77, 77)], shape, None, 4)
    assert error(step.run(), step.exact()) < TOLERANCE[torch.bfloat16]


@settings(
    max_examples=examples(12),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    chunks=st.lists(st.tuples(st.integers(2, 70), st.integers(0, 90)), min_size=1, max_size=5),
    singles=st.lists(st.integers(1, 130), max_size=3),
    heads=st.sampled_from([(2, 2), (2, 1), (3, 1), (8, 2)]),
    window=st.sampled_from([None, 8, 40]),
    seed=st.integers(0, 1000),
)
def test_any_batch(
    device: torch.device,
    chunks: list[tuple[int, int]],
    singles: list[int],
    heads: tuple[int, int],
    window: int | None,
    seed: int,
) -> None:
    seqs = [(1, n) for n in sorted(singles, reverse=True)]
    seqs += [(new, new + before) for new, before in chunks]
    step = Step(seqs, shape_of(heads, 64, device), window, seed)
    assert error(step.run(), step.exact()) < TOLERANCE[torch.float32]
