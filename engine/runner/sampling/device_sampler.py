"""Sampling by kernels: the host prepares parameters, launches, and waits only for what it reads.

Knows no batch but its rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
from torch import Tensor

from engine.kernels.sampling import dispatch as kernels
from engine.kernels.sampling.types import SamplingTensors
from engine.protocol import TokenLogprob, TokenLogprobs
from engine.runner.batch.batch import SampleRow
from engine.runner.batch.transfers import Download, Transfers
from engine.runner.sampling.sampling_tensors import (
    SamplingScratch,
    logit_adjustments,
    sampling_tensors,
    to_device,
)

NamedTokens = tuple[int, ...]


class DeviceDrawing:
    """The tokens drawn for each row, as `sampler.Drawing`."""

    def __init__(
        self, drawn: Tensor, download: Download, asked: list[int], named: dict[int, NamedTokens]
    ) -> None:
        """drawn: int64 [S], -1 where nothing could be drawn. download: of it, and of the
        `RowLogprobs` if any are asked for, and of `named_logprobs` if any tokens are named. asked:
        as `kernels.logprobs`. named: by row."""
        self._drawn = drawn
        self._download = download
        self._asked = asked
        self._named = named

    @property
    def token_ids(self) -> Tensor:
        """int64 [S]; arbitrary ids of the vocabulary where nothing could be drawn."""
        return self._drawn.clamp(min=0)

    def results(self) -> list[tuple[int, TokenLogprobs | None] | None]:
        """Waits for the device. None for a row from which nothing can be drawn."""
        drawn, *found = (tensor.tolist() for tensor in self._download.wait())
        rows: list[TokenLogprobs | None] = [None] * len(self._asked)
        of_names = found.pop() if self._named else []
        if found:
            rows = [
                _logprobs(ids, values, count) if count >= 0 else None
                for count, ids, values in zip(self._asked, *found, strict=True)
            ]
        for (at, token_ids), values in zip(self._named.items(), of_names, strict=True):
            row = rows[at]
            assert row is not None, "tokens are named beside logprobs alone"
            top = list(map(TokenLogprob, token_ids, values))
            rows[at] = TokenLogprobs(row.chosen, top)
        return [
            (token_id, row) if token_id >= 0 else None
            for token_id, row in zip(drawn, rows, strict=True)
        ]


class DeviceSampler:
    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._scratch = SamplingScratch()
        self._transfers: Transfers | None = None

    def __call__(self, logits: Tensor, rows: Rows[SampleRow]) -> DeviceDrawing:
        """logits: [S, vocab] of any float dtype, row i for `rows[i]`; kept."""
        vocab, device = logits.shape[1], logits.device
        params = sampling_tensors(rows, vocab, self._eos_token_ids, device, self._scratch)
        return self.answer(logits, kernels.sample(logits, params), rows)

    def draw_adjusted(
        self,
        logits: Tensor,
        rows: Rows[SampleRow],
        plain: SamplingTensors,
        last_tokens: Tensor,
        out: Tensor,
    ) -> None:
        """Draw for rows some of which ask for adjustments. plain: their other parameters, on the
        device. last_tokens: as `logit_adjustments`. out: int64 [S]."""
        vocab, device = logits.shape[1], logits.device
        adjustments = logit_adjustments(
            rows, vocab, self._eos_token_ids, device, self._scratch, last_tokens
        )
        kernels.sample(logits, plain._replace(adjustments=adjustments), out)

    def answer(self, logits: Tensor, drawn: Tensor, rows: Rows[SampleRow]) -> DeviceDrawing:
        """Send what was drawn, int64 [S], to the host, and the log-probabilities asked for."""
        if self._transfers is None:
            self._transfers = Transfers(logits.device)
        vocab = logits.shape[1]
        wanted = [row.sampling.logprobs for row in rows]
        asked = [-1 if count is None else min(count, vocab) for count in wanted]
        tensors: tuple[Tensor, ...] = (drawn,)
        most = max(asked)
        if most >= 0:
            counts = to_device(asked, np.int32, logits.device)
            tensors += tuple(kernels.logprobs(logits, drawn, counts, most))
        named = {
            at: row.sampling.logprob_token_ids
            for at, row in enumerate(rows)
            if row.sampling.logprob_token_ids
        }
        if named:
            tensors += (named_logprobs(logits, named),)
        return DeviceDrawing(drawn, self._transfers.download(*tensors), asked, named)

    def let_answers_pass(self) -> None:
        """Before what was drawn is overwritten."""
        if self._transfers is not None:
            self._transfers.let_downloads_pass()


def named_logprobs(logits: Tensor, named: dict[int, NamedTokens]) -> Tensor:
    """float32 [N, K]: the log-probabilities of the tokens that N rows of logits [S, vocab] name,
    at most K; behind a row's own the first one's."""
    most = max(map(len, named.values()))
    ids = np.zeros((len(named), most), np.int64)
    for at, token_ids in enumerate(named.values()):
        ids[at] = token_ids[0]
        ids[at, : len(token_ids)] = token_ids
    rows = to_device(np.array(list(named), np.int64), np.int64, logits.device)
    picked = to_device(ids, np.int64, logits.device)
    return logits[rows].float().log_softmax(dim=-1).gather(1, picked)


def _logprobs(ids: list[int], values: list[float], count: int) -> TokenLogprobs:
    """A row of `RowLogprobs`: the token drawn, then the most likely ones."""
    top = list(map(TokenLogprob, ids[1 : 1 + count], values[1 : 1 + count]))
    return TokenLogprobs(TokenLogprob(ids[0], values[0]), top)
