"""Runs one scheduled step: batch, model, sampler.

Knows neither queues nor blocks but as numbers in a table, and keeps nothing between steps except
the KV cache and sums of embeddings. A device with kernels has a runner of its own,
`device_runner.py`, that launches otherwise and collects alike.

`launch` only hands work to the device; `collect` waits for what it sampled. A step may be launched
before the one before it was collected: tokens that only the device knows are fed to it there.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.attention.dispatch import attention_planner
from engine.kernels.attention.types import AttentionShape, KVLayer
from engine.models.decoder import Decoder, States
from engine.runner.batch.batch import Batch, SampleRow, build_batch
from engine.runner.sampling.pooling import PooledStates, Pooler
from engine.runner.sampling.prompt_scores import PromptScorer, PromptScores
from engine.runner.sampling.sampler import Drawing, Sampler, TorchDrawing, is_plain
from engine.scheduling.step_plan import Embedded, SchedulerOutput, Scored
from engine.sequence import Key, SampledTokens

Sampled = dict[Key, SampledTokens]


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step on the device."""

    rows: list[SampleRow]
    drawing: Drawing | None
    """The rows being sampled; None when the step samples nothing."""
    pooled: PooledStates | None = None
    """Embeddings; None when the step completes none."""
    scores: PromptScores | None = None
    """The scores of prompt tokens; None when no request asks for any."""

    def token_of(self) -> dict[Key, int]:
        """Row of the only token that each sequence samples."""
        return {row.seq.key: i for i, row in enumerate(self.rows)}


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
        self._plan = attention_planner(shape)
        self._windows = frozenset(model.config.windows)
        self._sampler = Sampler(eos_token_ids)
        self._pooler = Pooler(model, deterministic=shape.deterministic)
        self._scorer = PromptScorer(model)

    @property
    def generates(self) -> bool:
        return self._model.config.generates

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput, before: LaunchedStep | None = None) -> LaunchedStep:
        """Start a step. `before` is the step launched last, if it was not collected yet."""
        batch, states = self._compute(output, before)
        drawing = self._draw(states, batch) if batch.rows else None
        pooled = self._pooler(states, batch.pooled)
        return LaunchedStep(batch.rows, drawing, pooled, self._scorer(states, batch.scored))

    def _draw(self, states: States, batch: Batch) -> Drawing:
        rows, model = batch.rows, self._model
        if model.group.size > 1 and all(is_plain(row) for row in rows):
            chosen = model.most_likely(states, batch.sampling_rows)
            return TorchDrawing(chosen.clamp(min=0), chosen >= 0, {}, rows)
        return self._sampler(model.logits(states, batch.sampling_rows), rows)

    def collect(self, launched: LaunchedStep) -> Sampled:
        """Wait for a step: (request_id, index) -> the drafts that were right and the token behind
        them, for each sequence that samples. One whose logits are not finite numbers has no next
        token and is left out."""
        sampled: Sampled = {}
        if launched.drawing is None:
            return sampled
        drawn = launched.drawing.results()
        goes_on = True
        for row, token in zip(launched.rows, drawn, strict=True):
            key = row.seq.key
            if not row.drafts:
                goes_on = True
            elif goes_on:  # the row before was sampled; was the draft behind it right?
                goes_on = sampled[key][-1][0] == row.drafts[-1]
            goes_on = goes_on and token is not None
            if goes_on and token is not None:
                sampled.setdefault(key, []).append(token)
        return sampled

    @staticmethod
    def embedded(launched: LaunchedStep) -> Embedded:
        """Wait for a step's embeddings. One whose numbers are not finite is left out."""
        return {} if launched.pooled is None else launched.pooled.results()

    @staticmethod
    def scored(launched: LaunchedStep) -> Scored:
        """Wait for what a step tells of prompts. One whose numbers are not finite is left out."""
        return {} if launched.scores is None else launched.scores.results()

    @torch.inference_mode()
    def logits(
        self, output: SchedulerOutput, before: LaunchedStep | None = None
    ) -> tuple[list[SampleRow], Tensor]:
        """Compute the step. The rows that sample and their logits [S, vocab], in the model's
        dtype."""
        batch, states = self._compute(output, before)
        return batch.rows, self._model.logits(states, batch.sampling_rows)

    def _compute(
        self, output: SchedulerOutput, before: LaunchedStep | None
    ) -> tuple[Batch, States]:
        shape = self._shape
        batch = build_batch(output, block_size=shape.block_size, device=shape.device)
        self._feed(batch, before)
        if self._model.adapters is not None:
            self._model.adapters.assign(batch.adapters)
        plans = {window: self._plan(batch.attention, shape, window) for window in self._windows}
        return batch, self._model.states(batch.token_ids, batch.positions, plans, self._cache)

    @staticmethod
    def _feed(batch: Batch, before: LaunchedStep | None) -> None:
        """Fill in, on the device, the tokens that the step before samples."""
        if not batch.unknown:
            return
        assert before is not None and before.drawing is not None, "tokens that nobody samples"
        token_of = before.token_of()
        places, keys = zip(*batch.unknown, strict=True)
        device = batch.token_ids.device
        at = torch.tensor(places, device=device)
        sampled = before.drawing.token_ids
        batch.token_ids[at] = sampled[torch.tensor([token_of[key] for key in keys], device=device)]
