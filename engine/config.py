"""The configuration that was asked for (`EngineConfig`), and what was derived from it and the
machine (`ResolvedConfig`). Both frozen.

Sizes are tokens unless the name says bytes; durations are seconds.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import msgspec

from engine.errors import ConfigError

BLOCK_SIZE = 16
"""Tokens per KV block."""
AT_LEAST_ONE = (
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_waiting",
    "agentic_max_waiting",
    "batch_max_waiting",
    "num_draft_tokens",
    "num_threads",
)
"""Of an EngineConfig, where they are set."""

Pooling = Literal["last", "mean"]
"""Whose hidden states an embedding is made of: the last token's, or all tokens'."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an operator may ask of one engine process."""

    model: Path
    """A Hugging Face folder: config.json, *.safetensors, tokenizer.json."""
    served_name: str = ""
    """Empty: the folder's name."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: the checkpoint's own on CUDA, float32 on a CPU for models under 100 M parameters, else
    the checkpoint's."""
    quantization: Literal["none", "int8", "fp8"] = "none"
    """What dense linear layers become when they are loaded: int8 or float8, a scale for every
    output. A checkpoint that is quantised is served as it is stored."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """What keys and values are stored as. auto: dtype; fp8: float8_e4m3fn, half of bfloat16's."""
    deterministic: bool = False
    """A request's logits are the same bits alone and in any batch, however its tokens were cut into
    steps. Slower."""
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    """dummy: random weights of the right size, from config.json alone; for benchmarks."""
    adapters: dict[str, Path] = {}
    """LoRA adapters over the model, PEFT's folders by the name that requests ask for."""
    max_model_len: int | None = None
    """None: what the checkpoint says, cut to what the KV cache can hold."""
    max_num_batched_tokens: int = 512
    """One budget per step, shared by prefill chunks and decodes."""
    max_num_seqs: int = 64
    """Sequences running at once."""
    max_waiting: int = 1024
    """Requests queued in a lane before `EngineOverloaded`."""
    agentic_max_waiting: int | None = None
    batch_max_waiting: int | None = None
    """In that lane. None: `max_waiting`."""
    kv_cache_bytes: int | None = None
    """None: `kv_cache_fraction` of what is free when the weights are loaded."""
    kv_cache_fraction: float = 0.4
    """Above 0, at most 1. Host memory is taken as it is used: engines that start side by side see
    the same free memory, and their fractions must not add up to more than there is."""
    num_blocks: int | None = None
    """Overrides both of the above (tests)."""
    enable_prefix_caching: bool = True
    cache_lease_share: float = 0.25
    """Of all blocks: what one tenant may have kept for a time; at least 0, at most 1."""
    poison_freed_blocks: bool = False
    """Overwrite freed KV blocks with NaN, so that reading one shows. Slow."""
    itl_target_s: float = 0.2
    """A step with decodes carries only so much of a prompt that it should take no longer; 0: no
    target, the token budget alone bounds a step."""
    agentic_max_share: float = 0.9
    batch_max_share: float = 0.75
    """Of `max_num_seqs`, and of a step's tokens while a lane above has requests: what the lane has
    at most (`engine.scheduling.lanes`)."""
    agentic_kv_headroom: float = 0.05
    batch_kv_headroom: float = 0.1
    """Of all blocks: what the lane leaves free, for the lanes above, when it starts something."""
    speculative: Literal["off", "grammar", "ngram", "draft"] = "off"
    """grammar: guess what a grammar leaves no choice about; ngram: that, and that what followed the
    last tokens before will follow them again; draft: guess what `draft_model` says."""
    draft_model: Path | None = None
    """A folder as `model`'s, of a smaller model with the same vocabulary."""
    num_draft_tokens: int = 4
    """Guesses verified in a step, at most, for each sequence."""
    run_ahead: bool | None = None
    """Schedule a step while the one before runs. None: on CUDA, unless speculating."""
    num_threads: int | None = None
    """CPU threads for matrix work; None leaves torch's choice."""
    status_interval_s: float = 0.25
    step_timeout_s: float | None = None
    """A step loop that is not heard of for so long is hung: its gateways give it up, and whoever
    started it kills it some time after. None: derived from the model's and the step's size."""
    max_orphans: int = 10_000
    seed: int = 0

    def __post_init__(self) -> None:
        """ConfigError that names what no engine can run with."""
        for name in AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be 1 or more")
        for name in ("agentic_max_share", "batch_max_share"):
            if not 0 < (value := getattr(self, name)) <= 1:
                raise ConfigError(f"{name} is {value}; it must be above 0 and at most 1")
        for name in ("agentic_kv_headroom", "batch_kv_headroom"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 0 and below 1")
        if not 0 <= self.cache_lease_share <= 1:
            share = self.cache_lease_share
            raise ConfigError(f"cache_lease_share is {share}; it must be at least 0 and at most 1")
        if not 0 <= self.itl_target_s < math.inf:
            raise ConfigError(f"itl_target_s is {self.itl_target_s}; it must be 0 or more seconds")


class ResolvedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration the engine runs with; made once, after the weights are loaded."""

    config: EngineConfig
    served_name: str
    device: str
    dtype: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    sliding_window: int | None
    """Tokens a layer attends to; None when any layer is full attention."""
    num_blocks: int
    kv_bytes_per_token: int
    step_timeout_s: float
    max_steps_in_flight: int
    embedding_size: int
    generates: bool = True
    """False: the checkpoint has no head and only embeds."""
    whole_prompts: bool = False
    """An encoder: what it reads it reads in one step, and keeps nothing of it."""
    pooling: Pooling = "last"
    block_size: int = BLOCK_SIZE
