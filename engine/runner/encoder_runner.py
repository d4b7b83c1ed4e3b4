"""Runs one scheduled step of an encoder: whole texts, of which embeddings are made and nothing is
kept.

Knows neither queues nor blocks. It runs on any device by torch's own kernels; the texts of a step
are all there is of them, so there is nothing to launch ahead of.
"""

from __future__ import annotations

import torch

from engine.kernels.attention.types import AttentionShape
from engine.models.encoder import Encoder
from engine.runner.batch.batch import build_batch
from engine.runner.model_runner import LaunchedStep, Sampled
from engine.runner.sampling.pooling import Pooler
from engine.scheduling.step_plan import NOTHING, Embedded, SchedulerOutput, Scored


class EncoderRunner:
    generates = False

    def __init__(self, model: Encoder, shape: AttentionShape) -> None:
        self._model = model
        self._shape = shape
        self._pooler = Pooler(model, deterministic=shape.deterministic)

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput, before: LaunchedStep | None = None) -> LaunchedStep:
        """As `ModelRunner.launch`; each entry is a whole text."""
        assert all(entry.embeds and entry.start == 0 for entry in output.scheduled)
        shape = self._shape
        batch = build_batch(output, block_size=shape.block_size, device=shape.device)
        lengths: list[int] = batch.attention.query_lens.tolist()
        states = self._model.encode(batch.token_ids, batch.positions, lengths)
        return LaunchedStep(batch.rows, None, self._pooler(states, batch.pooled))

    def collect(self, launched: LaunchedStep) -> Sampled:
        """Nothing is said."""
        return {}

    @staticmethod
    def embedded(launched: LaunchedStep) -> Embedded:
        """Wait for a step's embeddings. One whose numbers are not finite is left out."""
        return NOTHING if launched.pooled is None else launched.pooled.results()

    @staticmethod
    def scored(launched: LaunchedStep) -> Scored:
        return NOTHING
