"""A folder becomes a model: dtype chosen, weights taken, nothing left over.

Above: `core.py`. Below: registry, checkpoint, `models/decoder.py`.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Literal

import torch

from engine.layers.parallel import SINGLE_RANK, ParallelGroup
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.weights.checkpoint import Checkpoint, CheckpointWeights
from engine.weights.registry import load_model_config

logger = logging.getLogger(__name__)

SMALL_MODEL_PARAMETERS = 100_000_000
"""Below it a CPU runs float32 unless told otherwise: exact, and fast enough."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TIED = frozenset({"lm_head.weight"})
"""Stored by some checkpoints although it is the embedding's own."""


def load_model(
    folder: Path,
    *,
    dtype: Literal["auto", "float32", "bfloat16", "float16"],
    device: torch.device,
    group: ParallelGroup = SINGLE_RANK,
) -> Decoder:
    """Raises ConfigError or UnsupportedModel, naming the file, field or tensor."""
    start = time.perf_counter()
    config = load_model_config(folder)
    checkpoint = Checkpoint(folder)
    num_parameters = checkpoint.num_parameters()
    chosen = _choose_dtype(dtype, config, device, num_parameters)
    weights = CheckpointWeights(checkpoint, dtype=chosen, device=device)
    model = Decoder(config, weights, dtype=chosen, device=device, group=group)
    weights.check_all_taken(optional=TIED if config.tie_word_embeddings else frozenset())
    logger.info(
        "loaded %s: %s, %.1f M parameters, %s on %s, %.2f s",
        folder.name,
        config.architecture,
        num_parameters / 1e6,
        str(chosen).removeprefix("torch."),
        device,
        time.perf_counter() - start,
    )
    return model


def _choose_dtype(
    asked: str, config: ModelConfig, device: torch.device, num_parameters: int
) -> torch.dtype:
    if asked != "auto":
        return DTYPES[asked]
    if device.type == "cpu" and num_parameters < SMALL_MODEL_PARAMETERS:
        return torch.float32
    return DTYPES[config.dtype or "float32"]
