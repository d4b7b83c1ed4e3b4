"""The options that an operator may set for the engines that `tollgate up` starts: flags of `python
-m engine`.

Knows no model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

KV_CACHE_FRACTION = 0.4
"""The share of free memory for the KV caches of engines that start together without a configured
size."""
KV_CACHE_SIZES = ("kv_cache_bytes", "kv_cache_fraction", "num_blocks")
"""Three ways to say one thing: who says one of them has said it."""

PositiveInt = Annotated[int, Meta(ge=1)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Headroom = Annotated[float, Meta(ge=0, lt=1)]
Seconds = Annotated[float, Meta(ge=0, le=3600)]
StepTimeout = Annotated[float, Meta(ge=1, le=86_400)]


class EngineOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[engine]`, and `[model.engine_options]` over it; None says nothing. See `engine.config`."""

    device: Literal["auto", "cpu", "cuda"] | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    load_format: Literal["safetensors", "dummy"] | None = None
    quantization: Literal["none", "int8", "fp8"] | None = None
    deterministic: bool | None = None
    max_model_len: PositiveInt | None = None
    max_num_batched_tokens: PositiveInt | None = None
    max_num_seqs: PositiveInt | None = None
    max_waiting: PositiveInt | None = None
    agentic_max_waiting: PositiveInt | None = None
    batch_max_waiting: PositiveInt | None = None
    itl_target_s: Seconds | None = None
    agentic_max_share: Fraction | None = None
    batch_max_share: Fraction | None = None
    agentic_kv_headroom: Headroom | None = None
    batch_kv_headroom: Headroom | None = None
    speculative: Literal["off", "grammar", "ngram", "draft"] | None = None
    draft_model: Path | None = None
    num_draft_tokens: PositiveInt | None = None
    kv_cache_bytes: PositiveInt | None = None
    kv_cache_fraction: Fraction | None = None
    """In [engine]: of all engines together, each is given its part; None: KV_CACHE_FRACTION. Of one
    model: its engine's alone."""
    num_blocks: PositiveInt | None = None
    kv_cache_dtype: Literal["auto", "fp8"] | None = None
    num_threads: PositiveInt | None = None
    step_timeout_s: StepTimeout | None = None
    seed: int | None = None
    prefix_caching: bool | None = None
    """None: on."""
    cache_lease_share: Share | None = None
    poison_freed_blocks: bool | None = None

    @property
    def sizes_kv_cache(self) -> bool:
        return any(getattr(self, name) is not None for name in KV_CACHE_SIZES)

    def over(self, others: EngineOptions) -> EngineOptions:
        """Return `others`, and what is said here in the place of what they say.

        A size of the KV cache takes the place of any other: the engine would heed the one that is
        not meant. Another way to guess takes that of a draft model.
        """
        fields = msgspec.structs.asdict(self).items()
        said = {name: value for name, value in fields if value is not None}
        unsaid = dict.fromkeys(KV_CACHE_SIZES) if self.sizes_kv_cache else {}
        if self.speculative not in (None, "draft"):
            unsaid |= {"draft_model": None}
        return msgspec.structs.replace(others, **(unsaid | said))

    def shared_by(self, num_engines: int) -> EngineOptions:
        """Return the options for each of several engines that start side by side: all see the same
        free memory, so each takes its part of what one alone would."""
        if self.kv_cache_bytes is not None or self.num_blocks is not None:
            return self
        fraction = KV_CACHE_FRACTION if self.kv_cache_fraction is None else self.kv_cache_fraction
        return msgspec.structs.replace(self, kv_cache_fraction=fraction / num_engines)

    def to_flags(self) -> list[str]:
        """Return the command-line arguments for the engine's process."""
        flags = []
        for name in self.__struct_fields__:
            value, flag = getattr(self, name), name.replace("_", "-")
            if isinstance(value, bool):
                # The engine is told only of what is not so by itself.
                by_itself = name == "prefix_caching"
                flags += [f"--no-{flag}" if by_itself else f"--{flag}"] * (value != by_itself)
            elif value is not None:
                flags += [f"--{flag}", str(value)]
        return flags
