"""From a step's hidden states to embeddings.

Knows no sequences but what a batch says of them, and keeps one vector of a mean that is not
complete.

An embedding is the mean over some tokens of a prompt: over the last one alone, or over all, whose
sum is then carried from chunk to chunk, in float32. The sums travel to the host behind the step, by
a copy that nobody waits for before the step is collected; the rest is done there. A sequence that
starts over, because it was preempted, starts a new sum.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.models.config import EmbeddingHead
from engine.models.decoder import Decoder, States
from engine.models.encoder import Encoder
from engine.runner.batch.batch import PooledSpan
from engine.runner.batch.transfers import Download, Transfers
from engine.runner.sampling.sampling_tensors import to_device
from engine.sequence import Key, Sequence, SequenceStatus

LEAST_NORM = 1e-12
"""A shorter vector has no direction: it is divided by this instead of its length."""


class PooledStates:
    """The embeddings that a step completes, first of all on the device."""

    def __init__(self, spans: Rows[PooledSpan], head: EmbeddingHead, sums: Download) -> None:
        """sums: float32 [spans, hidden]"""
        self._spans = spans
        self._head = head
        self._sums = sums

    def results(self) -> dict[Key, bytes]:
        """Waits for the device. One whose numbers are not finite is left out."""
        sums: NDArray[np.float32] = self._sums.wait()[0].numpy()
        return {
            span.seq.key: self._finish(span, row)
            for span, row in zip(self._spans, sums, strict=True)
            if np.isfinite(row).all()
        }

    def _finish(self, span: PooledSpan, row: NDArray[np.float32]) -> bytes:
        """As `EngineOutput.embedding`."""
        vector = row[: span.seq.dimensions].astype(np.float64) / span.num_pooled
        if self._head.normalise:
            vector /= max(float(np.linalg.norm(vector)), LEAST_NORM)
        return vector.astype("<f4").tobytes()


class Pooler:
    def __init__(self, model: Decoder | Encoder, *, deterministic: bool) -> None:
        """deterministic: sum in an order that does not depend on the chunks."""
        self._model = model
        self._deterministic = deterministic
        self._transfers: Transfers | None = None
        self._sums: dict[Sequence, Tensor] = {}
        """[hidden] of those whose last token is still to come; float64 if deterministic"""

    def __call__(self, states: States, spans: Rows[PooledSpan]) -> PooledStates | None:
        """Put the step's embeddings under way; None where it completes none."""
        for seq in [s for s in self._sums if s.status is not SequenceStatus.RUNNING]:
            del self._sums[seq]
        if not spans:
            return None
        device = states.residual.device
        rows = np.concatenate([np.arange(span.start, span.stop) for span in spans])
        hidden = self._model.hidden(states, to_device(rows, np.int32, device))
        complete = [span for span in spans if span.completes]
        if len(complete) == len(rows) and all(span.begins for span in spans):
            sums = hidden.float()  # of one token each
        else:
            sums = self._add_up(hidden, spans)
        if not complete:
            return None
        if self._transfers is None:
            self._transfers = Transfers(device)
        return PooledStates(complete, self._model.config.embedding, self._transfers.download(sums))

    def _add_up(self, hidden: Tensor, spans: Rows[PooledSpan]) -> Tensor:
        """float32 [complete spans, hidden]; what is not complete is kept."""
        found = []
        parts = hidden.split([span.stop - span.start for span in spans])
        for span, part in zip(spans, parts, strict=True):
            before = None if span.begins else self._sums.pop(span.seq)
            total = self._sum(before, part)
            if span.completes:
                found.append(total)
            else:
                self._sums[span.seq] = total
        return torch.stack(found).float() if found else hidden[:0].float()

    def _sum(self, before: Tensor | None, part: Tensor) -> Tensor:
        if self._deterministic:
            # A running sum adds one token after the other, in float64 at any rate on a CPU: what is
            # carried must not be rounded otherwise than what is not.
            numbers = part.double()
            if before is not None:
                numbers = torch.cat((before[None], numbers))
            return numbers.cumsum(0)[-1].clone()  # not a view of all
        total = part.sum(0, dtype=torch.float32)
        return total if before is None else before + total
