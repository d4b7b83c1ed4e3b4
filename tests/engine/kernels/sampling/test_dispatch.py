"""Sampling on the device against the torch sampler, token for token at the same uniforms; where the
two differ, float64 says that the draw fell on a boundary within rounding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels.sampling import dispatch as kernels
from engine.kernels.sampling import triton as sampling_triton
from engine.kernels.sampling import triton_adjust as sampling_adjust_triton
from engine.kernels.sampling import triton_logprobs as sampling_logprobs_triton
from engine.runner.batch.batch import SampleRow
from engine.runner.sampling import sampler as sampler_module
from engine.runner.sampling.device_sampler import DeviceSampler
from engine.runner.sampling.logit_adjustments import adjust_logits
from engine.runner.sampling.sampler import Sampler, uniforms
from engine.runner.sampling.sampling_tensors import SamplingScratch, sampling_tensors
from tests.budget import NIGHT, examples
from tests.engine.constraints import Residues
from tests.engine.sample_rows import sample_row

pytestmark = pytest.mark.usefixtures("poisoned")

EOS = frozenset({2})
ROUNDING = 1e-5
"""A token's share may be off by this: exp and sums are in float32."""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True, scope="module")
def several_tiles_a_row() -> Any:
    """Small tiles, so that small vocabularies take several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling_triton, "TILE", 128)
        patch.setattr(sampling_triton, "DEFAULT", {"BLOCK": 64, "ROOM": 70, "num_warps": 1})
        patch.setattr(sampling_logprobs_triton, "DEFAULT", {"BLOCK": 64, "num_warps": 1})
        yield


def by_kernels(logits: Tensor, rows: list[SampleRow]) -> list[int]:
    """-1 where nothing can be drawn."""
    drawn = DeviceSampler(EOS)(logits.to(DEVICE), rows).results()
    return [-1 if token is None else token[0] for token in drawn]


def by_torch(logits: Tensor, rows: list[SampleRow]) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "uses_triton", lambda _: False)
        drawn = Sampler(EOS)(logits.clone(), rows).results()
    return [-1 if token is None else token[0] for token in drawn]


def on_a_boundary(logits: Tensor, row: SampleRow, token_id: int) -> bool:
    """Whether float64 allows the draw of `token_id` if sums and filters may be off by ROUNDING."""
    p = row.sampling
    scaled = (logits.double() - logits.double().max()) / p.temperature
    weight = scaled.exp()
    order = scaled.sort(descending=True).values
    floors = {-math.inf, math.log(p.min_p) if p.min_p else -math.inf}
    kept = scaled >= max(floors) - ROUNDING
    if 0 < p.top_k < len(logits):
        kept &= scaled >= order[p.top_k - 1]
    total = float(weight[kept].sum())
    u = float(uniforms([row.seed], [row.num_output_tokens])[0])
    for slack in (-ROUNDING, 0.0, ROUNDING):
        edge = -math.inf
        if p.top_p < 1:
            reached = order.exp().cumsum(0) >= (p.top_p + slack) * total
            edge = float(order[int(reached.float().argmax())]) if reached.any() else -math.inf
        mass = weight.where(kept & (scaled >= edge), 0.0).cumsum(0)
        first = float(mass[token_id - 1]) if token_id else 0.0
        near = ROUNDING * float(mass[-1])
        if first - near <= u * float(mass[-1]) < float(mass[token_id]) + near:
            return True
    return False


ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.2, 0.7, 1.0, 3.0]),
            "top_k": st.sampled_from([0, 1, 2, 5, 30, 1000]),
            "top_p": st.sampled_from([1e-3, 0.05, 0.5, 0.9, 0.999, 1.0]),
            "min_p": st.sampled_from([0.0, 0.01, 0.3, 1.0]),
        }
    ),
    min_size=1,
    max_size=4,
)


@given(rows=ROWS, seed=st.integers(0, 2**64 - 16), vocab=st.sampled_from([3, 64, 200]))
@settings(max_examples=examples(12), deadline=None)
def test_token_for_token(rows: list[dict[str, Any]], seed: int, vocab: int) -> None:
    """Half of the logits on a grid, so that ties are common; some are -inf."""
    generator = torch.Generator().manual_seed(seed % 2**32)
    logits = torch.randn(len(rows), vocab, generator=generator) * 3
    if seed % 2:
        logits = (logits * 4).round() / 4
    logits[:, 1::7] = -math.inf
    places = [
        sample_row(derived_seed=seed + i, output=[1] * i, **params) for i, params in enumerate(rows)
    ]
    drawn = by_kernels(logits, places)
    wanted = by_torch(logits, places)
    for i, (ours, theirs) in enumerate(zip(drawn, wanted, strict=True)):
        assert ours == theirs or on_a_boundary(logits[i], places[i], ours), places[i].sampling


def test_the_boundary_check_can_fail() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(9))
    place = sample_row(derived_seed=4, top_p=0.9)
    (token_id,) = by_torch(logits[None], [place])
    assert on_a_boundary(logits, place, token_id)
    assert not any(on_a_boundary(logits, place, i) for i in range(50) if i != token_id)


def test_uniforms_bit_for_bit() -> None:
    """With 2**k equal weights the token is the k leading bits of the uniform."""
    seeds = [0, 7, 2**63 + 5, 2**64 - 1]
    positions = [0, 3, 2**33, 12]
    logits = torch.zeros(4, 256, device=DEVICE)
    rows = [sample_row(derived_seed=seed) for seed in seeds]
    params = sampling_tensors(rows, 256, EOS, DEVICE, SamplingScratch())
    params = params._replace(positions=torch.tensor(positions, device=DEVICE))
    wanted = np.floor(uniforms(seeds, positions) * 256).astype(int).tolist()
    assert kernels.sample(logits, params).tolist() == wanted


@pytest.mark.parametrize("params", [{"top_p": 0.8}, {"top_k": 90}], ids=str)
def test_a_list_of_what_is_left_changes_nothing(
    params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether no key, some or all fit in the list that the later passes of a search read."""
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(6))
    rows = [sample_row(derived_seed=i, temperature=1.0, **params) for i in range(3)]
    tensors = sampling_tensors(rows, 200, EOS, DEVICE, SamplingScratch())
    for room in (1, 70, 256):
        changed = {**sampling_triton.DEFAULT, "ROOM": room}
        monkeypatch.setattr(sampling_triton, "DEFAULT", changed)
        lists = torch.full((3, room), -1, dtype=torch.int32, device=DEVICE)
        drawn = sampling_triton.draw(logits.to(DEVICE), tensors, lists=lists)
        assert drawn.tolist() == by_torch(logits, rows)
        assert (lists[:, 0] >= 0).all(), "no list was made"


def test_the_same_alone_and_in_any_batch() -> None:
    logits = torch.randn(4, 150, generator=torch.Generator().manual_seed(2)) * 2
    rows = [
        sample_row(derived_seed=1, top_p=0.9),
        sample_row(derived_seed=2, top_k=3),
        sample_row(temperature=0.0),
        sample_row(derived_seed=3),
    ]
    together = by_kernels(logits, rows)
    assert together == [by_kernels(logits[i : i + 1], [rows[i]])[0] for i in range(4)]
    assert together == by_kernels(logits.flip(0), rows[::-1])[::-1]


def test_half_precision_logits_are_read_as_they_are() -> None:
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(2)).half()
    rows = [sample_row(temperature=0.0), sample_row(derived_seed=5, top_p=0.8)]
    assert by_kernels(logits, rows) == by_torch(logits.float(), rows)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_draws_nothing(bad: float, temperature: float) -> None:
    logits = torch.zeros(3, 140)
    logits[1, 4 if bad > -math.inf or bad != bad else slice(None)] = bad
    drawn = by_kernels(logits, [sample_row(temperature=temperature) for _ in range(3)])
    assert [token == -1 for token in drawn] == [False, True, False]


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e30])
def test_extreme_temperatures(temperature: float) -> None:
    logits = torch.tensor([[0.0, 90.0, 89.0, -1e30]])
    rows = [sample_row(temperature=temperature)]
    assert by_kernels(logits, rows)[0] in ({1} if temperature < 1 else {0, 1, 2, 3})


@pytest.mark.parametrize(
    ("params", "interpreted_draws"),
    [
        pytest.param({}, 150, id="plain"),
        pytest.param({"temperature": 1.7, "top_k": 4, "top_p": 0.9}, 30, id="cut", marks=NIGHT),
    ],
)
def test_chi_square(params: dict[str, Any], interpreted_draws: int) -> None:
    """The drawn distribution is softmax of what the filters keep, in float64."""
    draws, vocab = (20_000, 24) if DEVICE.type == "cuda" else (interpreted_draws, 8)
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    rows = [sample_row(derived_seed=i, **params) for i in range(draws)]
    counts = np.bincount(by_kernels(logits.repeat(draws, 1), rows), minlength=vocab)
    scaled = logits.double() / params.get("temperature", 1.0)
    order = scaled.sort(descending=True)
    share = order.values.exp()
    share[params.get("top_k", vocab) :] = 0
    before = share.cumsum(0) - share
    share[before >= params.get("top_p", 1.0) * share.sum()] = 0
    wanted = {
        int(i): float(p) for i, p in zip(order.indices, share / share.sum(), strict=True) if p > 0
    }
    assert counts.sum() == sum(counts[i] for i in wanted), "a filtered token was drawn"
    statistic = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in wanted.items())
    freedom = len(wanted) - 1
    # Wilson-Hilferty: the cube root of chi-square is nearly normal; 4 sigma.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3


TOKENS = st.lists(st.integers(0, 79), min_size=1, max_size=30)


@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {
                "prompt": TOKENS,
                "output": st.lists(st.integers(0, 19), max_size=30),
                "repetition_penalty": st.sampled_from([1.0, 0.5, 1.3]),
                "frequency_penalty": st.sampled_from([0.0, 0.5, -1.0]),
                "presence_penalty": st.sampled_from([0.0, 1.5, -0.3]),
                "logit_bias": st.dictionaries(
                    st.integers(0, 79), st.floats(-100, 100), max_size=20
                ),
                "min_tokens": st.integers(0, 20),
                "stop_token_ids": st.sampled_from([(), (5,), tuple(range(0, 80, 4))]),
                "ignore_eos": st.booleans(),
                "constraint": st.sampled_from([None, Residues()]),
            }
        ),
        min_size=1,
        max_size=3,
    ),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=examples(25), deadline=None)
def test_adjustments(rows: list[dict[str, Any]], seed: int) -> None:
    """As torch adjusts them; the scratch is clean again, and the raw logits are kept."""
    logits = torch.randn(len(rows), 80, generator=torch.Generator().manual_seed(seed)) * 3
    places = [sample_row(**params) for params in rows]
    wanted = logits.clone()
    adjust_logits(wanted, places, EOS)
    scratch = SamplingScratch()
    _, adjusted = scratch.take(4, 80, DEVICE)
    adjusted.fill_(math.nan)
    params = sampling_tensors(places, 80, EOS, DEVICE, scratch)
    on_device = logits.to(DEVICE)
    if params.adjustments is None:
        assert torch.equal(wanted, logits)
        return
    out = sampling_adjust_triton.adjust(on_device, params.adjustments).cpu()
    torch.testing.assert_close(out, wanted, rtol=1e-6, atol=1e-6)
    assert not params.adjustments.counts.any() and torch.equal(on_device.cpu(), logits)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.randn(4, 150, generator=torch.Generator().manual_seed(5))
    logits[3] = -math.inf
    logits[3, 9], logits[3, 70] = 0.5, 0.5
    rows = [
        sample_row(temperature=0.0, logit_bias={7: 100.0}, logprobs=3),
        sample_row(temperature=0.0),
        sample_row(temperature=0.4, top_k=2, logprobs=0),
        sample_row(temperature=0.0, logprobs=4),
    ]
    drawn = DeviceSampler(EOS)(logits.to(DEVICE), rows).results()
    reference = logits.double().log_softmax(dim=-1)
    assert drawn[0] is not None and drawn[0][0] == 7
    assert drawn[1] is not None and drawn[1][1] is None
    for i, k in ((0, 3), (2, 0), (3, 4)):
        result = drawn[i]
        assert result is not None and result[1] is not None
        token_id, found = result[0], result[1]
        assert found.chosen.token_id == token_id
        assert found.chosen.logprob == pytest.approx(float(reference[i, token_id]), abs=1e-5)
        best = sorted(range(150), key=lambda t: (-float(logits[i, t]), t))[:k]
        assert [top.token_id for top in found.top] == best
        wanted = [float(reference[i, t]) for t in best]
        assert [top.logprob for top in found.top] == pytest.approx(wanted, abs=1e-5)


def test_named_tokens_stand_in_the_place_of_the_likeliest() -> None:
    logits = torch.randn(3, 150, generator=torch.Generator().manual_seed(5))
    rows = [
        sample_row(temperature=0.0, logprobs=3, logprob_token_ids=(149, 0, 7)),
        sample_row(temperature=0.0, logprobs=2),
        sample_row(temperature=0.0, logprobs=0, logprob_token_ids=(4,)),
    ]
    reference = logits.double().log_softmax(dim=-1)
    drawn = DeviceSampler(EOS)(logits.to(DEVICE), rows).results()
    for number, found in enumerate(drawn):
        assert found is not None and found[1] is not None
        named = rows[number].sampling.logprob_token_ids or reference[1].topk(2).indices.tolist()
        assert [top.token_id for top in found[1].top] == list(named)
        wanted = [float(reference[number, token_id]) for token_id in named]
        assert [top.logprob for top in found[1].top] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_argmax_over_a_vocabulary_in_shards(ranks: int) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(ranks))
    logits[1, [5, 155, 299]] = 9.0
    logits[2, 200] = math.nan
    size = 300 // ranks
    shards = [
        kernels.shard_argmax(part.contiguous().to(DEVICE), i * size)
        for i, part in enumerate(torch.chunk(logits, ranks, dim=1))
    ]
    best, ids = (torch.stack(parts) for parts in zip(*shards, strict=True))
    wanted = logits.argmax(dim=-1).tolist()
    assert kernels.combine_argmax(best, ids).tolist() == [wanted[0], 5, -1, wanted[3]]
