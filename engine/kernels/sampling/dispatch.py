"""From logits to the next token on the device: adjustments, threshold, draw, log-probabilities.

Knows rows, not requests: a row's outcome depends on its own logits and parameters alone, in any
batch. Nothing is sorted and the host is never waited for.

    x = logits + bias; x = -inf where the row may not stop yet
    x = x / r if x > 0 else x * r          for tokens of prompt and output (arXiv:1909.05858)
    x = x - f * count - p * (count > 0)    count: how often the output has the token
    x = -inf where the row's grammar does not allow the token
    s = (x - max x) / temperature,  w = exp(s) in units of 2**-42
    kept: s >= log(min_p), s >= the top_k-th largest s, s >= the largest t with
          sum of w over s >= t at least top_p of the mass that the other two left
    token: the first, in the order of the vocabulary, whose running sum of kept w exceeds u * total

w is an integer, so that every sum is exact and independent of its order; what is below 2**-42 of
the most likely token is never drawn. u is Philox4x32-10 of (seed, position), as
`runner/sampling/sampler.py` computes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.backend import uses_triton
from engine.kernels.sampling.types import RowLogprobs, SamplingTensors


def sample(logits: Tensor, params: SamplingTensors, out: Tensor | None = None) -> Tensor:
    """logits [S, V] of any float dtype, kept -> int64 [S] token ids, in `out` if it is given; -1
    for a row from which nothing can be drawn, because its logits leave no distribution."""
    from engine.kernels.sampling import triton as sampling_triton
    from engine.kernels.sampling import triton_adjust as sampling_adjust_triton

    if params.adjustments is not None:
        logits = sampling_adjust_triton.adjust(logits, params.adjustments)
    return sampling_triton.draw(logits, params, out)


def logprobs(logits: Tensor, token_ids: Tensor, asked: Tensor, most: int) -> RowLogprobs:
    """asked: int32 [S], how many of the most likely tokens a row wants, at most `most`; -1: it
    wants nothing and gets nothing. token_ids: int64 [S] as `sample` gave them."""
    from engine.kernels.sampling import triton_logprobs as sampling_logprobs_triton

    return sampling_logprobs_triton.logprobs(logits, token_ids, asked, most)


def shard_argmax(logits: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """logits [S, V / ranks] of the token ids from `first` on -> the largest, float32 [S], and its
    id, int64 [S], the lowest of equals; a logit that is not a number counts as infinite."""
    if not uses_triton(logits.device):
        known = logits.float().nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        return known.amax(dim=1), known.argmax(dim=1) + first
    from engine.kernels.sampling import triton as sampling_triton

    best, ids = sampling_triton.tile_maxima(logits)
    return _lowest_of_largest(best, ids.to(torch.int64) + first, dim=1)


def combine_argmax(best: Tensor, ids: Tensor) -> Tensor:
    """Combine what `shard_argmax` gave on every rank, [ranks, S] each -> int64 [S] token ids, the
    lowest of equals; -1 where the largest is not a finite number.
    """
    largest, token_ids = _lowest_of_largest(best, ids, dim=0)
    return token_ids.where(largest.isfinite(), -1)


def _lowest_of_largest(best: Tensor, ids: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    largest = best.amax(dim=dim, keepdim=True)
    beyond = torch.iinfo(ids.dtype).max
    return largest.squeeze(dim), ids.where(best == largest, beyond).amin(dim=dim)
