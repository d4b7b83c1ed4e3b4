"""From logits to the next token of each sequence, and its log-probabilities.

Knows no batch but its rows: each row's outcome depends on its own logits, parameters, seed and
position alone.

min_p, top_k and top_p each keep the tokens above some logit, so together they are one threshold a
row, and equal logits share one fate. Only values are sorted and only where a few of the largest do
not settle it. What is left is drawn by inverting its cumulative distribution at one uniform number,
in the order of the vocabulary. The number is a function of seed and position, with no state to
carry: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3",
SC 2011).
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.backend import uses_triton
from engine.kernels.pointwise import cpu as cpu_rows
from engine.kernels.sampling import cpu as cpu_drawing
from engine.kernels.sampling.types import GREEDY_TEMPERATURE
from engine.protocol import TokenLogprob, TokenLogprobs
from engine.runner.batch.batch import SampleRow
from engine.runner.sampling.device_sampler import DeviceDrawing, DeviceSampler
from engine.runner.sampling.logit_adjustments import adjust_logits, is_adjusted

NUCLEUS_FIRST = 128
"""Tokens looked at for top_p; rows whose nucleus is larger are sorted."""
PHILOX_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)

Words = NDArray[np.uint64]
"""[..., words] of 32 bits each, in 64-bit lanes so that products do not overflow."""

Drawn = tuple[int, TokenLogprobs | None]


class TorchDrawing:
    """The tokens drawn for each row, first of all on the device."""

    def __init__(
        self, token_ids: Tensor, sound: Tensor | None, raw: dict[int, Tensor], rows: Rows[SampleRow]
    ) -> None:
        self.token_ids = token_ids
        """int64 [S]; arbitrary ids of the vocabulary where nothing could be drawn"""
        self.sound = sound
        """bool [S]: something could be drawn; None: from each row"""
        self.raw = raw
        """Row -> log-softmax [vocab], where asked for"""
        self._rows = rows

    def results(self) -> list[Drawn | None]:
        """Waits for the device. None for a row from which nothing can be drawn, because its logits
        leave no distribution: the other rows are not touched by that."""
        token_ids: list[int] = self.token_ids.tolist()
        if self.sound is None and not self.raw:
            return [(token_id, None) for token_id in token_ids]
        sound = [True] * len(token_ids) if self.sound is None else self.sound.tolist()
        return [
            (token_id, _logprobs(self.raw.get(i), token_id, row)) if sound[i] else None
            for i, (row, token_id) in enumerate(zip(self._rows, token_ids, strict=True))
        ]


Drawing = TorchDrawing | DeviceDrawing


class Sampler:
    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._on_device = DeviceSampler(eos_token_ids)

    def __call__(self, logits: Tensor, rows: Rows[SampleRow]) -> Drawing:
        """logits: [S, vocab] of any float dtype, row i for `rows[i]`; used up."""
        if uses_triton(logits.device):
            return self._on_device(logits, rows)
        plain = [is_plain(row) for row in rows]
        chosen = cpu_rows.argmax(logits) if any(plain) else None
        if chosen is None:
            return self._choose(logits.float(), rows)
        served = zip(plain, chosen.tolist(), strict=True)
        rest = [i for i, (is_served, best) in enumerate(served) if not is_served or best < 0]
        if not rest:
            return TorchDrawing(chosen, None, {}, rows)
        others = self._choose(logits[rest].float(), [rows[i] for i in rest])
        assert others.sound is not None
        sound = torch.ones(len(rows), dtype=torch.bool)
        chosen[rest], sound[rest] = others.token_ids, others.sound
        raw = {rest[i]: row for i, row in others.raw.items()}
        return TorchDrawing(chosen, sound, raw, rows)

    def _choose(self, logits: Tensor, rows: Rows[SampleRow]) -> TorchDrawing:
        """logits: float32, used up."""
        raw = self._raw_logprobs(logits, rows)
        adjust_logits(logits, rows, self._eos_token_ids)
        best, chosen = logits.max(dim=-1)
        drawn = [i for i, r in enumerate(rows) if r.sampling.temperature >= GREEDY_TEMPERATURE]
        if drawn and cpu_drawing.draws(logits):
            whole: list[int] = []
            filtered: list[int] = []
            for i in drawn:
                (whole if is_unfiltered(rows[i], logits.shape[1]) else filtered).append(i)
            if whole:
                chosen[whole] = _draw_from_all(logits, best, whole, [rows[i] for i in whole])
            drawn = filtered
        if drawn:
            at = torch.tensor(drawn, device=logits.device)
            chosen[at] = _draw(logits[at], best[at], [rows[i] for i in drawn])
        last = logits.shape[1] - 1
        return TorchDrawing(chosen.clamp(max=last), best.isfinite() & (chosen <= last), raw, rows)

    @staticmethod
    def _raw_logprobs(logits: Tensor, seqs: Rows[SampleRow]) -> dict[int, Tensor]:
        """Row -> log-softmax [vocab] of the logits as the model gave them, where asked for."""
        asked = [i for i, seq in enumerate(seqs) if seq.sampling.logprobs is not None]
        if not asked:
            return {}
        rows = torch.tensor(asked, device=logits.device)
        return dict(zip(asked, logits[rows].log_softmax(dim=-1), strict=True))


def is_plain(row: SampleRow) -> bool:
    """Whether the largest of the row's logits is all that is asked for."""
    sampling = row.sampling
    greedy = sampling.temperature < GREEDY_TEMPERATURE
    return greedy and sampling.logprobs is None and not is_adjusted(row)


def is_unfiltered(row: SampleRow, vocab: int) -> bool:
    """Whether the row is drawn from without looking for its largest tokens."""
    return row.sampling.top_p >= 1 and not 0 < row.sampling.top_k < vocab


def philox4x32(counter: Words, key: Words) -> Words:
    """counter [N, 4], key [N, 2] -> [N, 4]; all words are 32 bits wide."""
    c0, c1, c2, c3 = (counter[:, i] for i in range(4))
    k0, k1 = key[:, 0], key[:, 1]
    for _ in range(PHILOX_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> _WORD) ^ c1 ^ k0, p1 & _LOW, (p0 >> _WORD) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack((c0, c1, c2, c3), axis=1)


def uniforms(seeds: list[int], positions: list[int]) -> NDArray[np.float64]:
    """One draw from [0, 1) for each (seed, position), both below 2**64. Multiples of 2**-52: a draw
    times a sum stays below the sum."""
    seed, position = np.array(seeds, np.uint64), np.array(positions, np.uint64)
    zero = np.zeros_like(position)
    counter = np.stack((position & _LOW, position >> _WORD, zero, zero), axis=1)
    words = philox4x32(counter, np.stack((seed & _LOW, seed >> _WORD), axis=1))
    bits = (words[:, 1] << _WORD) | words[:, 0]
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _draw_from_all(logits: Tensor, best: Tensor, at: Rows[int], seqs: Rows[SampleRow]) -> Tensor:
    """As `_draw`, of rows `at` that are unfiltered, in two reads and without a copy."""
    drawn = cpu_drawing.draw(
        logits,
        np.array(at, np.int64),
        best.numpy()[at],
        np.array([seq.sampling.temperature for seq in seqs], np.float32),
        np.array([seq.sampling.min_p for seq in seqs], np.float32),
        uniforms([seq.seed for seq in seqs], [seq.num_output_tokens for seq in seqs]),
    )
    return torch.from_numpy(drawn)


def _draw(logits: Tensor, best: Tensor, seqs: Rows[SampleRow]) -> Tensor:
    """Token ids int64 [R] from logits [R, vocab] whose row maxima are `best` [R]; `vocab` itself
    for a row whose mass is not a finite number."""
    device = logits.device
    params = [seq.sampling for seq in seqs]
    temperature = torch.tensor([p.temperature for p in params], device=device)
    # Relative to the largest, so that a small temperature cannot overflow.
    scaled = (logits - best[:, None]).div_(temperature[:, None])
    weight = scaled.exp()
    floor = torch.tensor([p.min_p for p in params], device=device).log()
    floor = _apply_top_k(scaled, [p.top_k for p in params], floor)
    weight.masked_fill_(scaled < floor[:, None], 0.0)
    floor = _apply_top_p(scaled, weight, [p.top_p for p in params], floor)
    weight.masked_fill_(scaled < floor[:, None], 0.0)
    mass = weight.cumsum(dim=-1, dtype=torch.float64)
    draws = uniforms([seq.seed for seq in seqs], [seq.num_output_tokens for seq in seqs])
    target = torch.from_numpy(draws).to(device) * mass[:, -1]
    token_ids = torch.searchsorted(mass, target[:, None], right=True).squeeze(1)
    return token_ids.where(mass[:, -1].isfinite(), logits.shape[1])


def _apply_top_k(scaled: Tensor, top_k: list[int], floor: Tensor) -> Tensor:
    """`floor` [R] raised to the k-th largest of each row with a top_k."""
    vocab = scaled.shape[1]
    asked = [i for i, k in enumerate(top_k) if 0 < k < vocab]
    if not asked:
        return floor
    rows = torch.tensor(asked, device=scaled.device)
    rank = torch.tensor([top_k[i] - 1 for i in asked], device=scaled.device)
    largest = scaled[rows].topk(int(rank.max()) + 1, dim=-1).values
    kth = largest.gather(1, rank[:, None]).squeeze(1)
    return floor.index_copy(0, rows, torch.maximum(floor[rows], kth))


def _apply_top_p(scaled: Tensor, weight: Tensor, top_p: list[float], floor: Tensor) -> Tensor:
    """`floor` [R] raised so that the tokens kept are the fewest, most likely first, whose share of
    the mass `weight` [R, vocab] (what min_p and top_k left) is at least top_p."""
    vocab = scaled.shape[1]
    asked = [i for i, p in enumerate(top_p) if p < 1]
    for count in (min(NUCLEUS_FIRST, vocab), vocab):
        if not asked:
            break
        rows = torch.tensor(asked, device=scaled.device)
        share = torch.tensor([top_p[i] for i in asked], dtype=torch.float64, device=scaled.device)
        target = share * weight[rows].sum(dim=-1, dtype=torch.float64)
        largest = _largest(scaled[rows], count)
        mass = largest.exp().cumsum(dim=-1, dtype=torch.float64)
        # The first token that reaches the target is the last one kept. All of them together reach
        # it but for rounding.
        last = (mass < target[:, None]).sum(dim=-1)
        reached = last < (count if count < vocab else vocab + 1)
        edge = largest.gather(1, last.clamp(max=count - 1)[:, None]).squeeze(1)
        edge = torch.where(reached, edge, float("-inf"))
        floor = floor.index_copy(0, rows, torch.maximum(floor[rows], edge))
        asked = [i for i, done in zip(asked, reached.tolist(), strict=True) if not done]
    return floor


def _largest(scaled: Tensor, count: int) -> Tensor:
    """The `count` largest values of each row [R, vocab], descending."""
    if count < scaled.shape[1]:
        return scaled.topk(count, dim=-1).values
    if scaled.device.type == "cpu":  # numpy's vectorised sort: measured 20 times torch's speed
        return torch.from_numpy(np.sort(scaled.numpy(), axis=-1)).flip(-1)
    return scaled.sort(dim=-1, descending=True).values


def _logprobs(raw: Tensor | None, token_id: int, seq: SampleRow) -> TokenLogprobs | None:
    """raw: [vocab], None where no log-probabilities were asked for."""
    if raw is None:
        return None
    chosen, named = TokenLogprob(token_id, float(raw[token_id])), seq.sampling.logprob_token_ids
    if named:
        values = raw[torch.tensor(named, device=raw.device)]
        return TokenLogprobs(chosen, list(map(TokenLogprob, named, values.tolist())))
    values, ids = raw.topk(min(seq.sampling.logprobs or 0, len(raw)))
    return TokenLogprobs(chosen, list(map(TokenLogprob, ids.tolist(), values.tolist())))
