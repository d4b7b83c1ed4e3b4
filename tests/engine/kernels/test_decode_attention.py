"""Attention of single tokens: split keys, merged; speculation; padding; the choice of splits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.kernels.attention import triton as paged_attention_triton
from engine.kernels.attention import triton_decode as decode
from engine.kernels.attention.types import to_device
from tests.budget import examples
from tests.engine.kernels.attention_steps import TOLERANCE, Step, error, shape_of


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_head_dim(device: torch.device, head_dim: int, dtype: torch.dtype) -> None:
    step = Step([(1, 300), (1, 65), (1, 1)], shape_of((2, 1), head_dim, device, dtype), None, 0)
    assert error(step.run(), step.exact()) < TOLERANCE[dtype]


@pytest.mark.parametrize("heads", [(3, 1), (7, 1), (4, 4), (9, 3), (16, 1), (71, 1)])
def test_every_group(device: torch.device, heads: tuple[int, int]) -> None:
    step = Step([(1, 80), (1, 17)], shape_of(heads, 64, device), None, 1)
    assert error(step.run(), step.exact()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("window", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("deterministic", [False, True])
def test_windows(
    device: torch.device, window: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first span begins at the window, and there is room for every span of one."""
    monkeypatch.setattr(decode, "WAVES", 4)
    shape = shape_of((4, 2), 64, device, deterministic=deterministic)
    step = Step([(1, 600), (1, 130), (1, 20)], shape, window, 2)
    assert error(step.run(), step.exact()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("cache", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("deterministic", [False, True])
def test_spans_are_merged(
    device: torch.device, cache: torch.dtype | None, deterministic: bool
) -> None:
    """One sequence of several spans beside some of one."""
    shape = shape_of((4, 2), 64, device, torch.float16, cache, deterministic=deterministic)
    step = Step([(1, 1100), (1, 40)], shape, None, 3)
    assert error(step.run(), step.exact()) < TOLERANCE[torch.float16]


def test_one_long_sequence_does_not_end_alone(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that fills the device splits its long sequences only."""
    monkeypatch.setattr(decode, "LONG_SPLIT", 128)
    monkeypatch.setattr(paged_attention_triton, "_num_units", lambda device: 1)
    shape = shape_of((4, 2), 64, device)
    step = Step([(1, 500), (1, 100), (1, 3)], shape, None, 4)
    assert error(step.run(), step.exact()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("queries", [2, 3, 8])
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("deterministic", [False, True])
def test_proposed_tokens_are_causal_among_themselves(
    device: torch.device, queries: int, window: int | None, deterministic: bool
) -> None:
    shape = shape_of((3, 1), 64, device, deterministic=deterministic)
    step = Step([(queries, 600), (2, 130), (1, 64)], shape, window, 5)
    metadata = replace(to_device(step.metadata, shape), num_single=3, max_single_query_len=queries)
    assert error(step.run(metadata), step.exact()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("deterministic", [False, True])
def test_padding_of_a_graph_is_not_touched(device: torch.device, deterministic: bool) -> None:
    """Bounds above what the step holds: sequences without queries, lengths below the longest."""
    shape = shape_of((4, 2), 64, device, deterministic=deterministic)
    step = Step([(1, 200), (1, 31)], shape, None, 6)
    exact = step.exact()
    real = to_device(step.metadata, shape)
    pad = torch.zeros(2, dtype=torch.int32, device=device)
    step.q = torch.cat([step.q, torch.full_like(step.q, torch.nan)])
    found = step.run(
        replace(
            real,
            query_start=torch.cat([real.query_start, pad + 2]),
            seq_lens=torch.cat([real.seq_lens, pad]),
            block_tables=torch.cat([real.block_tables, torch.zeros_like(real.block_tables)]),
            num_single=4,
            max_seq_len=1200,
        )
    )
    assert error(found[:2], exact) < TOLERANCE[torch.float32]
    assert found[2:].isnan().all()


@settings(
    max_examples=examples(10),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    lens=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    heads=st.sampled_from([(2, 2), (2, 1), (3, 1), (8, 2)]),
    window=st.sampled_from([None, 8, 100]),
    seed=st.integers(0, 1000),
)
def test_any_batch(
    device: torch.device,
    lens: list[int],
    heads: tuple[int, int],
    window: int | None,
    seed: int,
) -> None:
    seqs = [(1, n) for n in sorted(lens, reverse=True)]
    step = Step(seqs, shape_of(heads, 64, device), window, seed)
    assert error(step.run(), step.exact()) < TOLERANCE[torch.float32]


def config(**changes: int | bool | None) -> decode.DecodeConfig:
    options = {
        "num_seqs": 1,
        "num_kv_heads": 8,
        "max_queries": 1,
        "max_seq_len": 8192,
        "window": None,
        "num_units": 132,
        "deterministic": False,
    }
    return decode.decode_config(4, 128, **(options | changes))  # type: ignore[arg-type]


def test_the_number_of_splits_fills_the_device_and_no_more() -> None:
    assert config().num_splits == 33  # 2 waves of 132 over 8 heads
    assert config(max_seq_len=128).num_splits == 2  # no more than there are tiles
    assert config(num_seqs=256, max_seq_len=1024).num_splits == 1
    assert config(num_seqs=256, max_seq_len=131072).num_splits == 32
    assert config(window=128, max_seq_len=100_000).num_splits <= 5


def test_fixed_splits_depend_on_nothing_but_the_bound_of_lengths() -> None:
    alone, full = config(deterministic=True), config(deterministic=True, num_seqs=200)
    assert alone == full and alone.split == 512 and alone.num_splits == 16
    assert config(deterministic=True, window=600).num_splits == 3
