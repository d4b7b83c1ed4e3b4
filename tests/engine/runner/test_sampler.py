"""Sampling against naive references: filters, penalties, distribution, draws, log-probabilities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.protocol import SamplingParams
from engine.runner.batch.batch import SampleRow
from engine.runner.sampling import sampler as sampler_module
from engine.runner.sampling.logit_adjustments import adjust_logits
from engine.runner.sampling.sampler import Sampler, philox4x32, uniforms
from engine.sequence import Sequence
from tests.budget import examples
from tests.engine.sample_rows import sample_row

EOS = frozenset({2})


def draw(logits: Tensor, seqs: list[SampleRow]) -> list[int]:
    drawn = Sampler(EOS)(logits.clone(), seqs).results()
    assert all(d is not None for d in drawn)
    return [d[0] for d in drawn if d is not None]


def kept_tokens(logits: list[float], p: SamplingParams) -> dict[int, float]:
    """token id -> probability after temperature, min_p, top_k, top_p, one after another in plain
    Python; tokens of equal logit are kept together."""
    scaled = {i: x / p.temperature for i, x in enumerate(logits)}
    top = max(scaled.values())
    probability = {i: math.exp(x - top) for i, x in scaled.items()}
    kept = {i: x for i, x in probability.items() if x >= p.min_p}
    if p.top_k:
        kth = sorted(kept.values(), reverse=True)[: p.top_k][-1]
        kept = {i: x for i, x in kept.items() if x >= kth}
    total, mass, last = sum(kept.values()), 0.0, 0.0
    for x in sorted(kept.values(), reverse=True):
        mass, last = mass + x, x
        if mass >= p.top_p * total:
            break
    kept = {i: x for i, x in kept.items() if p.top_p == 1 or x >= last}
    total = sum(kept.values())
    return {i: x / total for i, x in kept.items()}


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            [0xFFFFFFFF] * 4,
            [0xFFFFFFFF] * 2,
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    """The vectors of Random123 (kat_vectors, philox4x32 10)."""
    words = philox4x32(np.array([counter], np.uint64), np.array([key], np.uint64))
    assert words[0].tolist() == expected


def test_uniforms_depend_on_seed_and_position_alone() -> None:
    seeds, positions = [7, 7, 8, 2**64 - 1], [0, 1, 0, 2**40]
    together = uniforms(seeds, positions)
    assert len(set(together.tolist())) == 4
    for i, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        assert uniforms([seed], [position])[0] == together[i]
    many = uniforms(list(range(4000)), [5] * 4000)
    assert (many >= 0).all() and (many < 1).all()
    assert abs(many.mean() - 0.5) < 0.02 and abs(many.var() - 1 / 12) < 0.01


def test_the_largest_draw_stays_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw of 1 - 2**-52 falls on the last token that may be drawn, zero falls on the first."""
    logits = torch.tensor([[-math.inf, 1.0, 1.1, 0.3, -math.inf]])
    for value, token_id in ((1 - 2.0**-52, 3), (0.0, 1)):
        fixed = np.array([value])
        monkeypatch.setattr(sampler_module, "uniforms", lambda *_, fixed=fixed: fixed)
        assert draw(logits, [sample_row()]) == [token_id]


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.2, 0.7, 1.0, 3.0]),
        "top_k": st.sampled_from([0, 1, 2, 5, 30, 1000]),
        "top_p": st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    }
)
ROWS = st.lists(PARAMS, min_size=1, max_size=6)


@given(rows=ROWS, seed=st.integers(0, 2**32), vocab=st.sampled_from([3, 40, 1500]))
@settings(max_examples=examples(120), deadline=None)
def test_draws_stay_within_the_filters(rows: list[dict[str, Any]], seed: int, vocab: int) -> None:
    """Rows with different filters side by side; logits on a grid, so that ties are common."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(len(rows), vocab, generator=generator) * 12).round() / 4
    seqs = [sample_row(derived_seed=seed + i, **row) for i, row in enumerate(rows)]
    for i, token_id in enumerate(draw(logits, seqs)):
        assert token_id in kept_tokens(logits[i].tolist(), seqs[i].sampling)


@given(rows=ROWS, seed=st.integers(0, 2**32))
@settings(max_examples=examples(40), deadline=None)
def test_rows_do_not_depend_on_each_other(rows: list[dict[str, Any]], seed: int) -> None:
    """Also where one row makes the search for its nucleus go on and the others do not."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(len(rows), 1, generator=generator) * 4
    logits = torch.randn(len(rows), 3000, generator=generator) * scale
    seqs = [sample_row(derived_seed=seed + i, **row) for i, row in enumerate(rows)]
    together = draw(logits, seqs)
    assert together == [draw(logits[i : i + 1], [seqs[i]])[0] for i in range(len(rows))]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 4},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.7, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_chi_square(params: dict[str, Any]) -> None:
    """20,000 draws at fixed seeds have the distribution that the naive reference computes."""
    draws, vocab = 20_000, 24
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    sampling = SamplingParams(max_tokens=100, **params)
    seqs = [sample_row(derived_seed=i, **params) for i in range(draws)]
    counts = np.bincount(draw(logits.expand(draws, -1), seqs), minlength=vocab)
    wanted = kept_tokens(logits.tolist(), sampling)
    assert counts.sum() == sum(counts[i] for i in wanted), "a filtered token was drawn"
    statistic = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in wanted.items())
    freedom = len(wanted) - 1
    # Wilson-Hilferty: the cube root of chi-square is nearly normal; 4 sigma.
    limit = freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


def test_consecutive_positions_are_independent() -> None:
    """Pairs of draws of one seed at positions 2i and 2i + 1: all 16 pairs equally often."""
    logits = torch.zeros(8000, 4)
    seqs = [sample_row(derived_seed=11, output=[0] * i) for i in range(8000)]
    drawn = np.array(draw(logits, seqs)).reshape(-1, 2)
    pairs = np.bincount(drawn[:, 0] * 4 + drawn[:, 1], minlength=16)
    assert ((pairs - 250.0) ** 2 / 250).sum() < 15 + 4 * math.sqrt(30)


def test_greedy_takes_the_largest_and_mixes_with_drawn_rows() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    seqs = [sample_row(temperature=t) for t in (0.0, 1.0, 1e-9, 0.0)]
    drawn = draw(logits, seqs)
    best = logits.argmax(dim=-1).tolist()
    assert [drawn[i] for i in (0, 2, 3)] == [best[i] for i in (0, 2, 3)]


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e30])
def test_extreme_temperatures(temperature: float) -> None:
    logits = torch.tensor([[0.0, 90.0, 89.0, -1e30]])
    seqs = [sample_row(temperature=temperature)]
    assert draw(logits, seqs)[0] in ({1} if temperature < 1 else {0, 1, 2, 3})


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_draws_nothing(bad: float, temperature: float) -> None:
    logits = torch.zeros(3, 10)
    logits[1, 4] = bad
    rows = [sample_row(temperature=temperature) for _ in range(3)]
    drawn = Sampler(EOS)(logits, rows).results()
    assert [d is None for d in drawn] == [False, True, False]


TOKENS = st.lists(st.integers(0, 19), min_size=1, max_size=30)


@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {
                "prompt": TOKENS,
                "output": st.lists(st.integers(0, 19), max_size=30),
                "repetition_penalty": st.sampled_from([1.0, 0.5, 1.3]),
                "frequency_penalty": st.sampled_from([0.0, 0.5, -1.0]),
                "presence_penalty": st.sampled_from([0.0, 1.5, -0.3]),
                "logit_bias": st.dictionaries(st.integers(0, 19), st.floats(-100, 100), max_size=4),
                "min_tokens": st.integers(0, 20),
                "stop_token_ids": st.sampled_from([(), (5,), (0, 19)]),
                "ignore_eos": st.booleans(),
            }
        ),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=examples(150), deadline=None)
def test_adjustments_against_plain_python(rows: list[dict[str, Any]], seed: int) -> None:
    logits = torch.randn(len(rows), 20, generator=torch.Generator().manual_seed(seed)) * 3
    seqs = [sample_row(**row) for row in rows]
    expected = [naive(logits[i].tolist(), seq) for i, seq in enumerate(seqs)]
    adjust_logits(logits, seqs, EOS)
    torch.testing.assert_close(logits, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def naive(logits: list[float], seq: Sequence) -> list[float]:
    """One row in the order that `SamplingParams` promises."""
    p, adjusted = seq.sampling, list(logits)
    for token_id, bias in p.logit_bias.items():
        adjusted[token_id] += bias
    if len(seq.seq.output_token_ids) < p.min_tokens:
        for token_id in {*p.stop_token_ids, *(() if p.ignore_eos else EOS)}:
            adjusted[token_id] = -math.inf
    for token_id in range(len(adjusted)):
        if token_id in seq.token_ids:
            x = adjusted[token_id]
            adjusted[token_id] = x / p.repetition_penalty if x > 0 else x * p.repetition_penalty
        count = seq.seq.output_token_ids.count(token_id)
        adjusted[token_id] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
    return adjusted


def test_logprobs_are_those_of_the_raw_logits() -> None:
    """Bias, penalties, temperature and filters change what is drawn, not what is reported."""
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(5))
    bias = {7: 100.0}
    seqs = [
        sample_row(temperature=0.0, logit_bias=bias, logprobs=3),
        sample_row(temperature=0.0),
        sample_row(temperature=0.4, top_k=2, logprobs=0),
        sample_row(temperature=0.0, logprobs=20),
    ]
    drawn = Sampler(EOS)(logits.clone(), seqs).results()
    reference = logits.double().log_softmax(dim=-1)
    assert drawn[0] is not None and drawn[0][0] == 7
    for i, k in ((0, 3), (2, 0), (3, 20)):
        row = drawn[i]
        assert row is not None
        token_id, logprobs = row
        assert logprobs is not None
        assert logprobs.chosen.token_id == token_id
        assert logprobs.chosen.logprob == pytest.approx(float(reference[i, token_id]), abs=1e-5)
        values, ids = reference[i].topk(k)
        assert [t.token_id for t in logprobs.top] == ids.tolist()
        assert [t.logprob for t in logprobs.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert drawn[1] is not None and drawn[1][1] is None


def test_named_tokens_stand_in_the_place_of_the_likeliest() -> None:
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(5))
    rows = [
        sample_row(temperature=0.0, logprobs=3, logprob_token_ids=(29, 0, 7)),
        sample_row(temperature=0.0, logprobs=2),
        sample_row(temperature=0.0, logprobs=0, logprob_token_ids=(4,)),
    ]
    reference = logits.double().log_softmax(dim=-1)
    for number, found in enumerate(Sampler(EOS)(logits.clone(), rows).results()):
        assert found is not None and found[1] is not None
        named = rows[number].sampling.logprob_token_ids or reference[1].topk(2).indices.tolist()
        assert [top.token_id for top in found[1].top] == list(named)
        wanted = [float(reference[number, token_id]) for token_id in named]
        assert [top.logprob for top in found[1].top] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_all_kinds_side_by_side(dtype: torch.dtype) -> None:
    """Each gets what it gets alone, whatever the others ask for."""
    torch.manual_seed(0)
    logits = (torch.randn(7, 50) * 4).to(dtype)
    logits[3, 5] = torch.nan
    logits[4] = -torch.inf
    logits[4, 9] = 1.0
    seqs = [
        sample_row(temperature=0.0),
        sample_row(temperature=1.0, derived_seed=3),
        sample_row(temperature=0.0, logit_bias={7: 100.0}),
        sample_row(temperature=0.0),
        sample_row(temperature=0.0),
        sample_row(temperature=0.0, logprobs=2),
        sample_row(temperature=0.0, min_tokens=3),
    ]
    together = Sampler(EOS)(logits.clone(), seqs).results()
    alone = [
        Sampler(EOS)(logits[i : i + 1].clone(), [seq]).results()[0] for i, seq in enumerate(seqs)
    ]
    assert together == alone
    assert together[3] is None
    assert [drawn[0] for drawn in (together[2], together[4]) if drawn] == [7, 9]
    assert together[5] is not None and together[5][1] is not None
    assert together[0] is not None and together[0][0] == int(logits[0].float().argmax())
