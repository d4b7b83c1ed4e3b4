"""Drawing on the device: against float64 of the same definition and the same uniforms.

Knows no model.

A draw is right when moving every sum and threshold by ROUNDING of a row's mass allows it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.gpu.findings import Finding, poisoned
from bench.gpu.place import Place
from engine.protocol import SamplingParams
from engine.runner.batch.batch import SampleRow
from engine.runner.sampling.device_sampler import DeviceSampler
from engine.runner.sampling.logit_adjustments import adjust_logits
from engine.runner.sampling.sampler import uniforms
from engine.sequence import Sequence

EOS = frozenset({2})
ROUNDING = 1e-5
"""The rounding error of a row's mass: exp and sums in float32."""
LOGPROB_LIMIT = 1e-4
FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 50},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 3.0, "min_p": 0.2},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.3, "top_p": 0.05},
]
PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7, "presence_penalty": -0.4},
    {"logit_bias": {5: 3.0, 17: -100.0, 90: 6.5}, "min_tokens": 1000},
]


def _row(seed: int, said: list[int], params: dict[str, Any]) -> SampleRow:
    seq = Sequence(
        request_id=f"r{seed}",
        index=0,
        order=(0, 0),
        prompt_token_ids=[1, *said[: len(said) // 2]],
        sampling=SamplingParams(max_tokens=10_000, **params),
        seed=seed,
        cache_salt="",
        output_token_ids=said[len(said) // 2 :],
    )
    return SampleRow(seq, seq.num_output_tokens, [])


def _logits(place: Place, rows: int, vocab: int, seed: int) -> Tensor:
    """Spread as a model's, on a grid in every second row: ties are common there."""
    logits = place.randn(rows, vocab, seed=seed) * 3
    logits[1::2] = (logits[1::2] * 4).round() / 4
    return logits.to(place.half)


def _draw(logits: Tensor, rows: list[SampleRow]) -> list[int]:
    with poisoned():
        drawn = DeviceSampler(EOS)(logits, rows).results()
    return [-1 if token is None else token[0] for token in drawn]


def filters(place: Place) -> Iterator[Finding]:
    vocabs = place.pick((128_256, 151_936, 32_000, 199), (130,))
    for vocab in vocabs:
        for params in FILTERS:
            count = place.pick(32, 3)
            rows = [_row(seed, [7] * (seed % 5), params) for seed in range(count)]
            logits = _logits(place, count, vocab, seed=vocab)
            drawn = _draw(logits, rows)
            wide = logits.double()
            wrong = sum(
                not _allowed(wide[i], row, token)
                for i, (row, token) in enumerate(zip(rows, drawn, strict=True))
            )
            yield Finding(f"{vocab} {params}", float(wrong), 0.0)


def adjustments(place: Place) -> Iterator[Finding]:
    vocab, count = place.pick((128_256, 16), (130, 2))
    draw = torch.Generator().manual_seed(3)
    for penalty in PENALTIES:
        for params in FILTERS[:4]:
            said = [
                torch.randint(100, (place.pick(3000, 30),), generator=draw).tolist()
                for _ in range(count)
            ]
            rows = [_row(i, tokens, params | penalty) for i, tokens in enumerate(said)]
            logits = _logits(place, count, vocab, seed=9)
            logits[:, :100] += 4.0  # what is adjusted is likely
            drawn = _draw(logits, rows)
            wide = logits.float()
            adjust_logits(wide, rows, EOS)
            wide = wide.double()
            wrong = sum(not _allowed(wide[i], row, drawn[i]) for i, row in enumerate(rows))
            yield Finding(f"{penalty} {params}", float(wrong), 0.0)


def logprobs(place: Place) -> Iterator[Finding]:
    vocab, count = place.pick((128_256, 33), (130, 2))
    for most in place.pick((0, 5, 20), (0, 3)):
        rows = [_row(i, [], {"logprobs": most}) for i in range(count)]
        logits = _logits(place, count, vocab, seed=most)
        with poisoned():
            drawn = DeviceSampler(EOS)(logits, rows).results()
        exact = torch.log_softmax(logits.double(), -1)
        furthest = 0.0
        for i, token in enumerate(drawn):
            assert token is not None and token[1] is not None
            said = token[1]
            best = exact[i].topk(most).values.tolist()
            pairs = [(said.chosen.logprob, float(exact[i, token[0]]))]
            pairs += [(top.logprob, wanted) for top, wanted in zip(said.top, best, strict=True)]
            pairs += [(top.logprob, float(exact[i, top.token_id])) for top in said.top]
            furthest = max(furthest, *(abs(a - b) for a, b in pairs))
        yield Finding(f"{most} most likely", furthest, LOGPROB_LIMIT)


def broken(place: Place) -> Iterator[Finding]:
    """A row without a distribution has no token, and its neighbours have theirs."""
    vocab = place.pick(128_256, 130)
    logits = _logits(place, 4, vocab, seed=1)
    logits[1, 5] = math.nan
    logits[2] = -math.inf
    drawn = _draw(logits, [_row(i, [], {}) for i in range(4)])
    for i, wrong in enumerate((True, False, False, True)):
        yield Finding(f"row {i}", float((drawn[i] >= 0) != wrong), 0.0)


def _allowed(logits: Tensor, row: SampleRow, token: int) -> bool:
    """logits float64 [V], adjusted."""
    p = row.sampling
    if token < 0:
        return False
    if p.temperature < 1e-5:
        return bool(logits[token] >= logits.max() - ROUNDING)
    scaled = (logits - logits.max()) / p.temperature
    order = scaled.sort(descending=True).values
    kept = scaled >= (math.log(p.min_p) if p.min_p else -math.inf) - ROUNDING
    if 0 < p.top_k < len(logits):
        kept &= scaled >= order[p.top_k - 1]
    weight = scaled.exp()
    total = weight.where(kept, 0.0).sum()
    u = float(uniforms([row.seed], [row.num_output_tokens])[0])
    for slack in (-ROUNDING, 0.0, ROUNDING):
        edge = torch.tensor(-math.inf, device=logits.device)
        if p.top_p < 1:
            reached = order.exp().cumsum(0) >= (p.top_p + slack) * total
            edge = order[reached.int().argmax()] if bool(reached.any()) else edge
        mass = weight.where(kept & (scaled >= edge), 0.0).cumsum(0)
        whole = float(mass[-1])
        first = float(mass[token - 1]) if token else 0.0
        near = ROUNDING * whole
        if first - near <= u * whole < float(mass[token]) + near:
            return True
    return False


CHECKS = {
    "sampling: filters": filters,
    "sampling: adjustments": adjustments,
    "sampling: log-probabilities": logprobs,
    "sampling: broken rows": broken,
}
