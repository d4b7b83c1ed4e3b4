"""Deterministic: a token's bits are those of the whole prompt, however it was computed."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.kernels.attention import triton_prefill as prefill
from engine.kernels.attention.triton import TritonAttentionPlan
from engine.kernels.attention.types import AttentionMetadata, KVLayer, to_device
from tests.budget import examples
from tests.engine.kernels.attention_steps import TOLERANCE, Step, error, part, shape_of

pytestmark = pytest.mark.usefixtures("products_without_place")

LENS = (140, 70)


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "DETERMINISTIC_SPLIT", 64)


def attend(step: Step, metadata: AttentionMetadata, rows: torch.Tensor) -> torch.Tensor:
    """Over a cache in which what these sequences do not hold yet is not a number."""
    k, v = torch.full_like(step.cache.k, torch.nan), torch.full_like(step.cache.v, torch.nan)
    for table, total in zip(metadata.block_tables, metadata.seq_lens, strict=True):
        for i in range(total):
            at = (int(table[i // 16]), slice(None), i % 16)
            k[at], v[at] = step.cache.k[at], step.cache.v[at]
    plan = TritonAttentionPlan(to_device(metadata, step.shape), step.shape, step.window)
    return plan.attend(step.q[rows], KVLayer(k, v))


def together(parts: list[tuple[AttentionMetadata, slice]]) -> tuple[AttentionMetadata, list[int]]:
    """One batch of the parts, single tokens first; and its rows."""
    parts = sorted(parts, key=lambda part: (part[0].query_lens[0] > 1, -part[0].seq_lens[0]))
    metas = [meta for meta, _ in parts]
    batch = AttentionMetadata(
        np.concatenate([meta.query_lens for meta in metas]),
        np.concatenate([meta.seq_lens for meta in metas]),
        np.concatenate([meta.block_tables for meta in metas]),
        sum(meta.num_single for meta in metas),
    )
    return batch, [row for _, rows in parts for row in range(rows.start, rows.stop)]


@settings(
    max_examples=examples(4),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    cuts=st.tuples(*[st.sets(st.integers(1, n - 1), max_size=3) for n in LENS]),
    window=st.sampled_from([None, 40]),
    heads=st.sampled_from([(2, 1), (3, 1)]),
    seed=st.integers(0, 1000),
)
def test_any_cut_and_any_batch_give_the_same_bits(
    device: torch.device,
    cuts: tuple[set[int], set[int]],
    window: int | None,
    heads: tuple[int, int],
    seed: int,
) -> None:
    step = Step(
        [(n, n) for n in LENS], shape_of(heads, 64, device, deterministic=True), window, seed
    )
    whole = step.run()
    assert error(whole, step.exact()) < TOLERANCE[torch.float32]
    pieces = [
        [part(step, row, a, b) for a, b in pairwise(sorted({0, n} | cut))]
        for row, (n, cut) in enumerate(zip(LENS, cuts, strict=True))
    ]
    for i in range(max(map(len, pieces))):
        batch, rows = together([piece[i] for piece in pieces if i < len(piece)])
        found = attend(step, batch, torch.tensor(rows, device=device))
        assert torch.equal(found, whole[rows])


@pytest.mark.parametrize("window", [None, 40])
def test_decoding_gives_the_bits_of_a_prompt(device: torch.device, window: int | None) -> None:
    """Check it because what was generated token by token is recomputed as a prompt after a
    preemption.
    """
    step = Step([(n, n) for n in LENS], shape_of((4, 1), 64, device, deterministic=True), window, 7)
    whole = step.run()
    for a, b in ((0, 0), (64, 63), (139, 69)):
        parts = [part(step, 0, a, a + 1), part(step, 1, b, b + 1)]
        for batch, rows in (together(parts), together(parts[:1]), together(parts[1:])):
            found = attend(step, batch, torch.tensor(rows, device=device))
            assert torch.equal(found, whole[rows])
