"""From a step's hidden states to log-probabilities of prompts' own tokens.

Knows no sequences but what a batch says of them, and keeps nothing between steps.

Every token of a prompt needs a row of logits, of which a chunk would have thousands at once: they
are made and looked at `ROWS` at a time, and what is left of each row, the token's own and the most
likely ones, travels to the host behind the step.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch
from torch import Tensor

from engine.models.decoder import Decoder, States
from engine.protocol import TokenLogprob, TokenLogprobs
from engine.runner.batch.batch import ScoredSpan
from engine.runner.batch.transfers import Download, Transfers
from engine.runner.sampling.sampling_tensors import to_device
from engine.sequence import Key

ROWS = 32
"""The rows of logits computed at once: as many as a step of that many sequences has."""


class PromptScores:
    """The scores that a step gives of prompts, first of all on the device."""

    def __init__(self, spans: Rows[ScoredSpan], found: Download) -> None:
        """found: float32 [R, 1 + k], int64 [R, 1 + k]: log-probabilities of the token that stands
        there and of the most likely ones; the rank of the former, and which the latter are."""
        self._spans = spans
        self._found = found

    def results(self) -> dict[Key, list[TokenLogprobs]]:
        """Waits for the device. One whose numbers are not finite is left out."""
        values, ids = self._found.wait()
        scores: dict[Key, list[TokenLogprobs]] = {}
        start = 0
        for span in self._spans:
            rows = slice(start, start + len(span.next_ids))
            start = rows.stop
            if values[rows].isfinite().all():
                scores[span.seq.key] = _entries(span, values[rows].tolist(), ids[rows].tolist())
        return scores


class PromptScorer:
    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._transfers: Transfers | None = None

    def __call__(self, states: States, spans: Rows[ScoredSpan]) -> PromptScores | None:
        """Put them under way; None where nobody asks for any."""
        if not spans:
            return None
        device = states.residual.device
        places = [np.arange(each.start, each.start + len(each.next_ids)) for each in spans]
        rows = to_device(np.concatenate(places), np.int32, device)
        said = [token_id for each in spans for token_id in each.next_ids]
        next_ids = to_device(np.array(said), np.int64, device)
        num_top = max(_num_top(each) for each in spans)
        found = [
            self._look(states, rows[first : first + ROWS], next_ids[first : first + ROWS], num_top)
            for first in range(0, len(said), ROWS)
        ]
        if self._transfers is None:
            self._transfers = Transfers(device)
        values, ids = (torch.cat(part) for part in zip(*found, strict=True))
        return PromptScores(spans, self._transfers.download(values, ids))

    def _look(
        self, states: States, rows: Tensor, next_ids: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor]:
        logprobs = self._model.logits(states, rows).float().log_softmax(dim=-1)
        top = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
        chosen = logprobs.gather(1, next_ids[:, None])
        rank = (logprobs > chosen).sum(dim=1, keepdim=True) + 1
        return torch.cat((chosen, top.values), dim=1), torch.cat((rank, top.indices), dim=1)


def _num_top(span: ScoredSpan) -> int:
    return span.seq.sampling.prompt_logprobs or 0


def _entries(
    span: ScoredSpan, values: list[list[float]], ids: list[list[int]]
) -> list[TokenLogprobs]:
    end = 1 + _num_top(span)
    return [
        TokenLogprobs(
            TokenLogprob(token_id, row[0]),
            list(map(TokenLogprob, top[1:end], row[1:end])),
            top[0],
        )
        for token_id, row, top in zip(span.next_ids, values, ids, strict=True)
    ]
