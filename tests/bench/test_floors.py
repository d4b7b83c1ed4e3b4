"""The floors against figures computed by hand for a Llama-3.1-8B on an H200."""

from __future__ import annotations

import pytest

from bench.gpu.floors import (
    BF16,
    FP8,
    H200,
    Precision,
    Roofline,
    causal_attention_flops,
    decode_step_s,
    mixed_s_per_token,
    prefill_s,
)
from bench.gpu.models import LLAMA_8B, shape_of

LLAMA = shape_of(LLAMA_8B)


def test_the_model() -> None:
    assert pytest.approx(6.98e9, rel=1e-3) == LLAMA.layer_parameters
    assert pytest.approx(0.525e9, rel=1e-3) == LLAMA.head_parameters
    assert LLAMA.kv_bytes(1, 2) == 128 * 1024


@pytest.mark.parametrize(
    ("batch", "precision", "wanted_ms"),
    [(1, BF16, 3.52), (32, BF16, 4.49), (256, BF16, 12.85), (32, FP8, 2.37), (256, FP8, 6.85)],
)
def test_decode(batch: int, precision: Precision, wanted_ms: float) -> None:
    found = decode_step_s(H200, LLAMA, batch, 1024, precision) * 1e3
    assert found == pytest.approx(wanted_ms, abs=0.006)


def test_tokens_per_second() -> None:
    assert 1 / decode_step_s(H200, LLAMA, 1, 1024) == pytest.approx(284, abs=0.5)
    assert 32 / decode_step_s(H200, LLAMA, 32, 1024) == pytest.approx(7128, rel=1e-3)
    assert 256 / decode_step_s(H200, LLAMA, 256, 1024) == pytest.approx(19_915, rel=1e-3)


@pytest.mark.parametrize(("precision", "wanted_ms"), [(BF16, 167), (FP8, 103)])
def test_prefill(precision: Precision, wanted_ms: float) -> None:
    assert prefill_s(H200, LLAMA, 8192, precision) * 1e3 == pytest.approx(wanted_ms, abs=0.5)


def test_mixed() -> None:
    """Within a part in 500 of the figure that was computed elsewhere."""
    assert 1 / mixed_s_per_token(H200, LLAMA, 1000, 1000) == pytest.approx(22_579, rel=2e-3)


def test_a_phase_takes_the_larger_of_its_two_times() -> None:
    """Few tokens wait for the weights' bytes, whatever the matrix units do; many do not."""
    slow_memory = Roofline(H200.bytes_per_s / 2, H200.bf16_flops, H200.fp8_flops)
    slow_units = Roofline(H200.bytes_per_s, H200.bf16_flops / 2, H200.fp8_flops / 2)
    once, long = decode_step_s(H200, LLAMA, 1, 1), prefill_s(H200, LLAMA, 65_536)
    assert decode_step_s(slow_memory, LLAMA, 1, 1) == pytest.approx(2 * once)
    assert decode_step_s(slow_units, LLAMA, 1, 1) == once
    assert prefill_s(slow_units, LLAMA, 65_536) == pytest.approx(2 * long, rel=1e-3)


def test_causal_attention() -> None:
    assert causal_attention_flops(LLAMA, 1) == 4 * 32 * 128
    assert causal_attention_flops(LLAMA, 3) == 6 * causal_attention_flops(LLAMA, 1)
