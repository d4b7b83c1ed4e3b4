"""Changes logits as requests ask before anything is drawn: bias, minimum length, penalties,
grammar.

In place and sparse: only the named tokens of the rows that asked are touched, so that a plain
request costs nothing. The order is that of `SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.sampling import cpu as cpu_drawing
from engine.protocol import SamplingParams
from engine.runner.batch.batch import SampleRow


def adjust_logits(logits: Tensor, seqs: Rows[SampleRow], eos_token_ids: frozenset[int]) -> None:
    """logits: float32 [S, vocab], row i for `seqs[i]`; changed in place."""
    _add_bias(logits, seqs)
    _forbid_early_stop(logits, seqs, eos_token_ids)
    _penalise(logits, seqs)
    _forbid_what_does_not_fit(logits, seqs)


def is_adjusted(row: SampleRow) -> bool:
    """Whether `adjust_logits` can change the row."""
    return row.seq.is_adjusted or row.num_output_tokens < row.seq.sampling.min_tokens


def allowed_tokens(seqs: Rows[SampleRow], vocab: int) -> NDArray[np.int32] | None:
    """[S, vocab / 32 rounded up]: a bit for each token, from the lowest of the first word on, set
    where a row's grammar allows it. None where no row has a grammar."""
    asked = [
        (index, row.seq.constraint, row.seq.output_token_ids, row.drafts)
        for index, row in enumerate(seqs)
        if row.seq.constraint is not None
    ]
    if not asked:
        return None
    for index, _, said, drafts in asked:
        num_said = len(said) + len(drafts)
        assert num_said == seqs[index].num_output_tokens, "a grammar ahead of time"
    masks = np.full((len(seqs), -(-vocab // 32)), -1, np.int32)
    asked[0][1].allow_all(asked, masks)
    return masks


def _add_bias(logits: Tensor, seqs: Rows[SampleRow]) -> None:
    biases = [
        (row, token_id, bias)
        for row, seq in enumerate(seqs)
        if seq.sampling.logit_bias
        for token_id, bias in seq.sampling.logit_bias.items()
    ]
    if biases:
        rows, token_ids, values = zip(*biases, strict=True)
        logits[list(rows), list(token_ids)] += torch.tensor(values, device=logits.device)


def _forbid_early_stop(
    logits: Tensor, seqs: Rows[SampleRow], eos_token_ids: frozenset[int]
) -> None:
    """Forbid what would end a sequence before `min_tokens` others."""
    forbidden = [
        (row, token_id)
        for row, seq in enumerate(seqs)
        if seq.num_output_tokens < seq.sampling.min_tokens
        for token_id in stop_ids(seq.sampling, eos_token_ids)
    ]
    if forbidden:
        rows, token_ids = zip(*forbidden, strict=True)
        logits[list(rows), list(token_ids)] = float("-inf")


def stop_ids(sampling: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Return the ids that end a sequence."""
    asked = frozenset(sampling.stop_token_ids)
    return asked if sampling.ignore_eos else asked | eos_token_ids


def _penalise(logits: Tensor, seqs: Rows[SampleRow]) -> None:
    """Repetition first, over prompt and output (arXiv:1909.05858); then frequency and presence,
    over the output alone."""
    for line, seq in zip(logits, seqs, strict=True):
        p = seq.sampling
        if not p.penalises:
            continue
        token_ids, counts = seq.seq.token_counts(seq.drafts)
        if p.repetition_penalty == 1:
            said = counts > 0
            token_ids, counts = token_ids[said], counts[said]
        at, count = (torch.from_numpy(each).to(logits.device) for each in (token_ids, counts))
        value = line[at]
        if p.repetition_penalty != 1:
            repetition = torch.tensor(p.repetition_penalty, device=logits.device)
            value = torch.where(value > 0, value / repetition, value * repetition)
        if p.frequency_penalty or p.presence_penalty:
            value -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
        line[at] = value


def _forbid_what_does_not_fit(logits: Tensor, seqs: Rows[SampleRow]) -> None:
    """Last, so that nothing brings a token back."""
    vocab = logits.shape[1]
    masks = allowed_tokens(seqs, vocab)
    if masks is None:
        return
    if cpu_drawing.forbids(logits):
        cpu_drawing.forbid(logits, masks)
        return
    bound = [i for i, row in enumerate(seqs) if row.seq.constraint is not None]
    bits = np.unpackbits(~masks[bound].view(np.uint8), axis=1, bitorder="little")[:, :vocab]
    forbidden = torch.from_numpy(bits.view(np.bool_)).to(logits.device)
    if len(bound) == len(seqs):  # as they often are; then nothing is copied
        logits.masked_fill_(forbidden, float("-inf"))
    else:
        logits[bound] = logits[bound].masked_fill_(forbidden, float("-inf"))
