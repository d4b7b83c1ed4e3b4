"""Runs one scheduled step: batch, model, sampler.

Above: `core.py`. Below: `batch.py`, `models/decoder.py`, `sampler.py`. Knows neither queues nor
blocks but as numbers in a table, and keeps nothing between steps except the KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from engine.kernels.paged_attention import AttentionShape, KVLayer, plan_attention
from engine.models.decoder import Decoder
from engine.runner.batch import build_batch
from engine.runner.sampler import Sampler
from engine.schedule import SampledTokens, SchedulerOutput
from engine.sequence import Sequence

Sampled = dict[tuple[str, int], SampledTokens]


class ModelRunner:
    def __init__(
        self,
        model: Decoder,
        cache: Rows[KVLayer],
        shape: AttentionShape,
        *,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._model = model
        self._cache = cache
        self._shape = shape
        self._windows = frozenset(model.config.windows)
        self._sampler = Sampler(eos_token_ids)

    def execute(self, output: SchedulerOutput) -> Sampled:
        """(request_id, index) -> next token of each sequence that samples in this step. One whose
        logits are not finite numbers has no next token and is left out."""
        with torch.inference_mode():
            seqs, logits = self.logits(output)
            drawn = self._sampler(logits, seqs) if seqs else []
        return {
            (seq.request_id, seq.index): [token]
            for seq, token in zip(seqs, drawn, strict=True)
            if token is not None
        }

    @torch.inference_mode()
    def logits(self, output: SchedulerOutput) -> tuple[list[Sequence], Tensor]:
        """Compute the step. The sequences that sample and their logits, float32 [S, vocab]."""
        shape = self._shape
        batch = build_batch(output, block_size=shape.block_size, device=shape.device)
        plans = {window: plan_attention(batch.attention, shape, window) for window in self._windows}
        logits = self._model(
            batch.token_ids, batch.positions, plans, self._cache, batch.sampling_rows
        )
        return batch.sampling, logits.float()
