"""A folder becomes a model: dtype chosen, weights taken, nothing left over."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import torch

from engine.layers.parallel import SINGLE_RANK, ParallelGroup
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.encoder import NOT_READ, Encoder
from engine.transport.startup import GIB, Startup
from engine.weights.adapters import Adapter
from engine.weights.checkpoint import Checkpoint, CheckpointWeights, paired_channels
from engine.weights.dummy import DummyWeights
from engine.weights.linear_source import LinearOptions, LinearSource, Quantization
from engine.weights.reading import TensorReader
from engine.weights.registry import load_model_config

logger = logging.getLogger(__name__)

SMALL_MODEL_PARAMETERS = 100_000_000
"""Below it a CPU runs float32 unless told otherwise: exact, and fast enough."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TIED = frozenset({"lm_head.weight"})
"""Stored by some checkpoints although it is the embedding's own."""


@dataclass(frozen=True, slots=True)
class _LoadOptions:
    """The options that are asked of a model, wherever its weights come from."""

    dtype: str
    device: torch.device
    group: ParallelGroup
    linear: LinearOptions
    startup: Startup
    max_model_len: int | None

    def choose_dtype(self, config: ModelConfig, num_parameters: int) -> torch.dtype:
        if self.dtype != "auto":
            return DTYPES[self.dtype]
        if self.device.type == "cpu" and num_parameters < SMALL_MODEL_PARAMETERS:
            return torch.float32
        return DTYPES[config.dtype or "float32"]


def load_model(
    folder: Path,
    *,
    dtype: Literal["auto", "float32", "bfloat16", "float16"],
    device: torch.device,
    group: ParallelGroup = SINGLE_RANK,
    load_format: Literal["safetensors", "dummy"] = "safetensors",
    quantization: Quantization = "none",
    adapters: Mapping[str, Path] | None = None,
    deterministic: bool = False,
    seed: int = 0,
    max_model_len: int | None = None,
    startup: Startup | None = None,
) -> Decoder | Encoder:
    """load_format: dummy needs config.json alone and draws the weights from `seed`.
    quantization: what dense linear layers become; a checkpoint that is quantised stays as it is.
    adapters: PEFT's folders by name. deterministic: see `WeightSource.deterministic`.
    max_model_len: the longest text, for which some rotations are scaled; None: the checkpoint's.

    Raises ConfigError or UnsupportedModel, naming the file, field or tensor.
    """
    startup = startup or Startup()
    with startup.phase("config"):
        config = load_model_config(folder)
    linear = LinearOptions(
        quantization,
        [Adapter(name, path) for name, path in (adapters or {}).items()],
        deterministic,
    )
    how = _LoadOptions(dtype, device, group, linear, startup, max_model_len)
    if load_format == "dummy":
        model, num_parameters = _build_dummy(config, how, seed)
    else:
        model, num_parameters = _build_stored(folder, config, how)
    logger.info(
        "loaded %s: %s, %.1f M %sparameters, %s on %s",
        folder.name,
        config.architecture,
        num_parameters / 1e6,
        "random " if load_format == "dummy" else "",
        str(model.dtype).removeprefix("torch."),
        device,
    )
    return model


def _build_stored(
    folder: Path, config: ModelConfig, how: _LoadOptions
) -> tuple[Decoder | Encoder, int]:
    began = time.perf_counter()
    checkpoint = Checkpoint(folder)
    if not checkpoint.has_head:
        config = msgspec.structs.replace(config, generates=False)
    if config.fused_projections:
        _split_projections(checkpoint, config)
    num_parameters = checkpoint.num_parameters()
    chosen = how.choose_dtype(config, num_parameters)
    rotates_all = config.rotary_dim == config.head_dim
    channels = None if rotates_all else paired_channels(config.head_dim, config.rotary_dim)
    with TensorReader(how.device) as reader:
        weights = CheckpointWeights(
            checkpoint, reader, dtype=chosen, device=how.device, channels=channels
        )
        source = LinearSource(weights, how.linear, device=how.device, stored=config.quantization)
        model = _build(config, source, chosen, how)
    source.check_adapters()
    weights.check_all_taken(optional=_optional(config))
    whole_s, convert_s = time.perf_counter() - began, weights.taken_s * reader.convert_share
    read_s = weights.taken_s - convert_s
    rate = reader.bytes_read / max(weights.taken_s, 1e-9) / GIB
    amount = f"{reader.bytes_read / GIB:.2f} GiB from disk, {rate:.1f} GiB/s with the conversion"
    how.startup.spent("weights: read", read_s, amount)
    how.startup.spent("weights: convert and copy", convert_s)
    how.startup.spent("weights: pack", whole_s - weights.taken_s)
    return model, num_parameters


def _split_projections(checkpoint: Checkpoint, config: ModelConfig) -> None:
    heads, kv_heads = (
        number * config.head_dim for number in (config.num_heads, config.num_kv_heads)
    )
    for index in range(config.num_layers):
        attention, mlp = (f"model.layers.{index}.{name}" for name in ("self_attn", "mlp"))
        sizes = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
        parts = [(f"{attention}.{name}.weight", rows) for name, rows in sizes.items()]
        checkpoint.split(f"{attention}.qkv_proj.weight", parts)
        halves = [
            (f"{mlp}.{name}.weight", config.intermediate_size) for name in ("gate_proj", "up_proj")
        ]
        checkpoint.split(f"{mlp}.gate_up_proj.weight", halves)


def _build(
    config: ModelConfig, source: LinearSource, dtype: torch.dtype, how: _LoadOptions
) -> Decoder | Encoder:
    if config.encoder is None:
        return Decoder(
            config,
            source,
            dtype=dtype,
            device=how.device,
            group=how.group,
            max_model_len=how.max_model_len,
        )
    return Encoder(config, source, dtype=dtype, device=how.device)


def _optional(config: ModelConfig) -> frozenset[str]:
    if config.encoder is not None:
        return frozenset(NOT_READ)
    return TIED if config.tie_word_embeddings else frozenset()


def _build_dummy(
    config: ModelConfig, how: _LoadOptions, seed: int
) -> tuple[Decoder | Encoder, int]:
    num_parameters = _num_matrix_elements(config)
    chosen = how.choose_dtype(config, num_parameters)
    with how.startup.phase("weights: random"):
        weights = DummyWeights(dtype=chosen, device=how.device, seed=seed)
        source = LinearSource(weights, how.linear, device=how.device)
        model = _build(config, source, chosen, how)
    source.check_adapters()
    return model, num_parameters


def _num_matrix_elements(config: ModelConfig) -> int:
    """Parameters without biases and norms, which are a part in thousands."""
    embeddings = 1 if config.tie_word_embeddings or not config.generates else 2
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    width = config.depth * heads * config.head_dim + 3 * _num_neurons(config)
    return config.hidden_size * (config.vocab_size * embeddings + width)


def _num_neurons(config: ModelConfig) -> int:
    """Return the neurons of the feed-forward layers of all layers, experts included."""
    routed = [False] * config.depth if config.experts is None else config.experts.layers
    expert = config.experts.num_experts * config.experts.intermediate_size if config.experts else 0
    return sum(expert if has_experts else config.intermediate_size for has_experts in routed)
