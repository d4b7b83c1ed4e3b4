"""What an operator may ask of the engines that `tollgate up` starts: flags of `python -m engine`.

Above: `settings_file` ([engine]), `served_models`, the supervisor. Below: nothing. Knows no model.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

KV_CACHE_FRACTION = 0.4
"""Of the free memory, for the KV caches of all engines that are started together."""

PositiveInt = Annotated[int, Meta(ge=1)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
StepTimeout = Annotated[float, Meta(ge=1, le=86_400)]


class EngineOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The flags of `python -m engine`; None leaves its default. See `engine.config`."""

    device: Literal["auto", "cpu", "cuda"] | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    load_format: Literal["safetensors", "dummy"] | None = None
    max_model_len: PositiveInt | None = None
    max_num_batched_tokens: PositiveInt | None = None
    max_num_seqs: PositiveInt | None = None
    max_waiting: PositiveInt | None = None
    kv_cache_bytes: PositiveInt | None = None
    kv_cache_fraction: Fraction | None = None
    """None: KV_CACHE_FRACTION. Each engine is given its part of it."""
    num_blocks: PositiveInt | None = None
    num_threads: PositiveInt | None = None
    step_timeout_s: StepTimeout | None = None
    seed: int | None = None
    prefix_caching: bool = True

    def shared_by(self, num_engines: int) -> EngineOptions:
        """For each of several engines that start side by side: all see the same free memory, so
        each takes its part of what one alone would."""
        if self.kv_cache_bytes is not None or self.num_blocks is not None:
            return self
        fraction = KV_CACHE_FRACTION if self.kv_cache_fraction is None else self.kv_cache_fraction
        return msgspec.structs.replace(self, kv_cache_fraction=fraction / num_engines)

    def to_flags(self) -> list[str]:
        """Command-line arguments for the engine's process."""
        flags = [] if self.prefix_caching else ["--no-prefix-caching"]
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name != "prefix_caching" and value is not None:
                flags += [f"--{name.replace('_', '-')}", str(value)]
        return flags
