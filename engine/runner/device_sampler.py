"""Sampling by kernels: the host prepares parameters, launches, and waits only for what it reads.

Above: `sampler.py`, whose torch code is the reference. Below: `sampling_tensors.py`,
`kernels/sampling.py`. Knows no batch but its rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
from torch import Tensor

from engine.kernels import sampling as kernels
from engine.kernels.sampling import RowLogprobs
from engine.protocol import TokenLogprob, TokenLogprobs
from engine.runner.batch import SampleRow
from engine.runner.sampling_tensors import SamplingScratch, sampling_tensors, to_device


class DeviceDrawing:
    """What was drawn for each row, as `sampler.Drawing`."""

    def __init__(self, drawn: Tensor, logprobs: RowLogprobs | None, asked: list[int]) -> None:
        """drawn: int64 [S], -1 where nothing could be drawn. asked: as `kernels.logprobs`."""
        self.token_ids = drawn.clamp(min=0)
        """int64 [S]; arbitrary ids of the vocabulary where nothing could be drawn"""
        self._drawn = drawn
        self._logprobs = logprobs
        self._asked = asked

    def results(self) -> list[tuple[int, TokenLogprobs | None] | None]:
        """Waits for the device. None for a row from which nothing can be drawn."""
        rows: list[TokenLogprobs | None] = [None] * len(self._asked)
        if self._logprobs is not None:
            table = zip(self._logprobs.ids.tolist(), self._logprobs.values.tolist(), strict=True)
            rows = [
                _logprobs(ids, values, count) if count >= 0 else None
                for count, (ids, values) in zip(self._asked, table, strict=True)
            ]
        drawn: list[int] = self._drawn.tolist()
        return [
            (token_id, row) if token_id >= 0 else None
            for token_id, row in zip(drawn, rows, strict=True)
        ]


class DeviceSampler:
    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._scratch = SamplingScratch()

    def __call__(self, logits: Tensor, rows: Rows[SampleRow]) -> DeviceDrawing:
        """logits: [S, vocab] of any float dtype, row i for `rows[i]`; kept."""
        vocab, device = logits.shape[1], logits.device
        params = sampling_tensors(rows, vocab, self._eos_token_ids, device, self._scratch)
        drawn = kernels.sample(logits, params)
        wanted = [row.sampling.logprobs for row in rows]
        asked = [-1 if count is None else min(count, vocab) for count in wanted]
        most = max(asked)
        found: RowLogprobs | None = None
        if most >= 0:
            found = kernels.logprobs(logits, drawn, to_device(asked, np.int32, device), most)
        return DeviceDrawing(drawn, found, asked)


def _logprobs(ids: list[int], values: list[float], count: int) -> TokenLogprobs:
    """A row of `RowLogprobs`: the token drawn, then the most likely ones."""
    top = list(map(TokenLogprob, ids[1 : 1 + count], values[1 : 1 + count]))
    return TokenLogprobs(TokenLogprob(ids[0], values[0]), top)
