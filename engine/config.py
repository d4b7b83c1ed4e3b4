"""The configuration that was asked for (`EngineConfig`), and what was derived from it and the
machine (`ResolvedConfig`). Both frozen.

Sizes are tokens unless the name says bytes; durations are seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from engine.errors import ConfigError
from engine.options import EngineOptions, engine_options

BLOCK_SIZE = 16
"""Tokens per KV block."""

Pooling = Literal["last", "mean"]
"""An embedding is made of the last token's hidden states, or of all tokens'."""


class EngineConfig(EngineOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that one engine process is started with: the operator's options, and what is served."""

    model: Path
    """A Hugging Face folder: config.json, *.safetensors, tokenizer.json."""
    served_name: str = ""
    """Empty: the folder's name."""
    adapters: dict[str, Path] = {}
    """LoRA adapters over the model, PEFT's folders by the name that requests ask for."""
    peer_listen: str | None = None
    """The address where other engines read KV blocks (`engine.transfer`); None: they cannot."""
    peer_token_file: Path | None = None
    """A file with the token that these show, and are shown; None: anyone who can connect may."""
    peer_identity: Path | None = None
    """The key and certificate of an engine that joined, by which others that joined meet it over
    TCP, with TLS and in place of a token; None: in the clear."""
    kv_key_file: Path | None = None
    """At least 32 random bytes, which the key of `kv_disk_encrypted` is derived from. It is read
    once: a gateway gives its engines a pipe."""
    insecure: bool = False
    """Let other machines connect where KV is read in the clear."""
    run_ahead: bool | None = None
    """Schedule a step while the one before runs. None: on CUDA, unless speculating."""
    status_interval_s: float = 0.1
    max_orphans: int = 10_000

    def __post_init__(self) -> None:
        """Raise a ConfigError that names an option out of its bound."""
        for option in engine_options():
            value = getattr(self, option.name)
            if value is not None and not option.allows(value):
                raise ConfigError(f"{option.name} is {value}; it must be {option.bound_in_words}")


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
    identities: dict[str, str]
    """As in `ReplicaStatus`."""
    generates: bool = True
    """False: the checkpoint has no head and only embeds."""
    whole_prompts: bool = False
    """An encoder: what it reads it reads in one step, and keeps nothing of it."""
    pooling: Pooling = "last"
    block_size: int = BLOCK_SIZE
