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


class DeviceDrawing:
    """The tokens drawn for each row, as `sampler.Drawing`."""

    def __init__(self, drawn: Tensor, download: Download, asked: list[int]) -> None:
        """drawn: int64 [S], -1 where nothing could be drawn. download: of it, and of the
        `RowLogprobs` if any are asked for. asked: as `kernels.logprobs`."""
        self._drawn = drawn
        self._download = download
        self._asked = asked

    @property
    def token_ids(self) -> Tensor:
        """int64 [S]; arbitrary ids of the vocabulary where nothing could be drawn."""
        return self._drawn.clamp(min=0)

    def results(self) -> list[tuple[int, TokenLogprobs | None] | None]:
        """Waits for the device. None for a row from which nothing can be drawn."""
        drawn, *found = (tensor.tolist() for tensor in self._download.wait())
        rows: list[TokenLogprobs | None] = [None] * len(self._asked)
        if found:
            rows = [
                _logprobs(ids, values, count) if count >= 0 else None
                for count, ids, values in zip(self._asked, *found, strict=True)
            ]
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
        return DeviceDrawing(drawn, self._transfers.download(*tensors), asked)

    def let_answers_pass(self) -> None:
        """Before what was drawn is overwritten."""
        if self._transfers is not None:
            self._transfers.let_downloads_pass()


def _logprobs(ids: list[int], values: list[float], count: int) -> TokenLogprobs:
    """A row of `RowLogprobs`: the token drawn, then the most likely ones."""
    top = list(map(TokenLogprob, ids[1 : 1 + count], values[1 : 1 + count]))
    return TokenLogprobs(TokenLogprob(ids[0], values[0]), top)
