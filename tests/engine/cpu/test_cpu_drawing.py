"""The processor's kernels for a draw, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.kernels.sampling import cpu as cpu_drawing
from tests.budget import examples

pytestmark = pytest.mark.skipif(
    not cpu_drawing.draws(torch.zeros(1, 16)), reason="no kernels on this processor"
)
VOCABS = (16, 512, 528, 4096, 49_152)
NEAR = 1e-5
"""A sum by blocks and one token by token may differ by this share of the mass."""


def row_of(seed: int, vocab: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 3, vocab).astype(np.float32)


def draw(
    logits: NDArray[np.float32],
    at: list[int],
    u: list[float],
    *,
    temperature: float = 1.0,
    min_p: float = 0.0,
) -> list[int]:
    count = len(at)
    found: list[int] = cpu_drawing.draw(
        torch.from_numpy(logits),
        np.array(at, np.int64),
        logits.max(axis=1)[at],
        np.full(count, temperature, np.float32),
        np.full(count, min_p, np.float32),
        np.array(u),
    ).tolist()
    return found


@settings(deadline=None, max_examples=examples(60))
@given(
    seed=st.integers(0, 2**32),
    vocab=st.sampled_from(VOCABS),
    u=st.floats(0, 1, exclude_max=True),
    temperature=st.sampled_from([0.1, 1.0, 2.0]),
    min_p=st.sampled_from([0.0, 0.05]),
)
def test_a_draw_inverts_the_cumulative_distribution(
    seed: int, vocab: int, u: float, temperature: float, min_p: float
) -> None:
    logits = np.stack([row_of(seed, vocab), row_of(seed + 1, vocab), row_of(seed + 2, vocab)])
    tokens = draw(logits, [2, 0], [u, u], temperature=temperature, min_p=min_p)
    for row, token in zip((2, 0), tokens, strict=True):
        weight = np.exp((logits[row].astype(np.float64) - logits[row].max()) / temperature)
        weight[weight < min_p * (1 - NEAR)] = 0
        ends = weight.cumsum() / weight.sum()
        begins = 0.0 if token == 0 else ends[token - 1]
        assert weight[token] > 0
        assert begins - NEAR <= u <= ends[token] + NEAR
    assert draw(logits[2:], [0], [u], temperature=temperature, min_p=min_p) == tokens[:1], "alone"


@pytest.mark.parametrize("vocab", VOCABS)
def test_the_ends_of_the_distribution(vocab: int) -> None:
    logits = np.full((1, vocab), -np.inf, np.float32)
    logits[0, [3, vocab - 2]] = 0
    largest = float(np.nextafter(1, 0))
    assert draw(logits, [0, 0, 0, 0], [0.0, 0.49, 0.51, largest]) == [3, 3, vocab - 2, vocab - 2]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_without_a_distribution_draws_nothing_and_disturbs_nobody(bad: float) -> None:
    logits = np.stack([row_of(1, 528), row_of(2, 528)])
    alone = draw(logits[1:], [0], [0.7])
    logits[0, :] = bad
    assert draw(logits, [0, 1], [0.7, 0.7]) == [528, *alone]


@settings(deadline=None, max_examples=examples(40))
@given(seed=st.integers(0, 2**32), words=st.sampled_from([1, 16, 17, 128]))
def test_what_a_mask_forbids_is_forbidden(seed: int, words: int) -> None:
    random = np.random.default_rng(seed)
    masks = random.integers(-(2**31), 2**31, (3, words)).astype(np.int32)
    masks[1] = -1
    masks[2, ::2] = 0
    logits = random.normal(0, 3, (3, 32 * words)).astype(np.float32)
    allowed = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little").astype(bool)
    masked = torch.from_numpy(logits.copy())
    assert cpu_drawing.forbids(masked)
    cpu_drawing.forbid(masked, masks)
    assert np.array_equal(masked.numpy(), np.where(allowed, logits, -np.inf))
