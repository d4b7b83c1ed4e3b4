"""The one table of what an operator may set of an engine: each option's type, bound, default and
help.

Everything else is made of it: the flags of `python -m engine`, the keys of `[engine]` and
`[model.engine_options]` in tollgate.toml with their checks, the command line that the supervisor
builds, and the table in docs/configuration.md. Pure data: a gateway imports it without torch.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct


def _describe(group: str, sentence: str) -> Meta:
    return Meta(description=sentence, extra={"group": group})


_model = partial(_describe, "model")
_steps = partial(_describe, "steps")
_memory = partial(_describe, "memory")
_process = partial(_describe, "process")

PositiveInt = Annotated[int, Meta(ge=1)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Headroom = Annotated[float, Meta(ge=0, lt=1)]
StepTarget = Annotated[float, Meta(ge=0, le=3600)]
StepTimeout = Annotated[float, Meta(ge=1, le=86_400)]


class EngineOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options. Sizes are tokens unless the name says bytes; durations are seconds.

    To add one, add its field here, use it in the engine, and run `make fields`.
    """

    load_format: Annotated[
        Literal["safetensors", "dummy"],
        _model("dummy: random weights from config.json alone, for benchmarks"),
    ] = "safetensors"
    quantization: Annotated[
        Literal["none", "int8", "fp8"],
        _model(
            "what dense linear layers become when they are loaded; a quantised checkpoint stays"
        ),
    ] = "none"
    """Each output has a scale of its own."""
    device: Annotated[Literal["auto", "cpu", "cuda"], _model("where to run")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        _model("auto: the checkpoint's, but float32 for a small model on a CPU"),
    ] = "auto"
    """Small: under 100 M parameters."""
    deterministic: Annotated[
        bool, _model("the same logits, to the bit, alone and in any batch; slower")
    ] = False
    """However a request's tokens are cut into steps."""
    max_model_len: Annotated[
        PositiveInt | None,
        _model("context length; unset: the checkpoint's, stretched by its RoPE scaling"),
    ] = None
    """None: what the checkpoint says, cut to what the KV cache can hold."""
    seed: Annotated[int, _model("for requests that bring no seed")] = 0
    max_num_batched_tokens: Annotated[
        PositiveInt, _steps("budget of one step, prefill and decode together")
    ] = 512
    max_num_seqs: Annotated[PositiveInt, _steps("sequences running at once")] = 64
    max_waiting: Annotated[
        PositiveInt, _steps("requests queued in a lane before more of it are refused")
    ] = 1024
    itl_target_s: Annotated[
        StepTarget,
        _steps(
            "how long a step with decodes should take at most; prompt chunks are sized for it. "
            "0: no target"
        ),
    ] = 0.2
    agentic_max_waiting: Annotated[
        PositiveInt | None, _steps("of lane agentic; unset: --max-waiting")
    ] = None
    agentic_max_share: Annotated[
        Fraction,
        _steps("of --max-num-seqs, and of a step beside higher lanes: most for lane agentic"),
    ] = 0.9
    """See `engine.scheduling.lanes`."""
    agentic_kv_headroom: Annotated[
        Headroom,
        _steps("KV blocks that lane agentic leaves to higher lanes when it starts something"),
    ] = 0.05
    """A part of all blocks."""
    batch_max_waiting: Annotated[
        PositiveInt | None, _steps("of lane batch; unset: --max-waiting")
    ] = None
    batch_max_share: Annotated[
        Fraction,
        _steps("of --max-num-seqs, and of a step beside higher lanes: most for lane batch"),
    ] = 0.75
    batch_kv_headroom: Annotated[
        Headroom,
        _steps("KV blocks that lane batch leaves to higher lanes when it starts something"),
    ] = 0.1
    speculative: Annotated[
        Literal["off", "grammar", "ngram", "draft"],
        _steps(
            "grammar: guess what a grammar leaves no choice about; ngram: that, and that what "
            "followed the last tokens before follows them again; draft: guess what --draft-model "
            "says"
        ),
    ] = "off"
    draft_model: Annotated[
        Path | None, _steps("a folder: a smaller model with the same vocabulary")
    ] = None
    num_draft_tokens: Annotated[
        PositiveInt, _steps("guesses verified in a step, for each sequence")
    ] = 4
    kv_cache_bytes: Annotated[
        PositiveInt | None, _memory("KV memory; unset: --kv-cache-fraction")
    ] = None
    kv_cache_fraction: Annotated[
        Fraction, _memory("KV memory as a part of what is free once the weights are loaded")
    ] = 0.4
    """Host memory is taken as it is used: engines that start side by side see the same free memory,
    and their fractions must not add up to more than there is."""
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"],
        _memory("what keys and values are stored as. auto: the model's dtype"),
    ] = "auto"
    """fp8: float8_e4m3fn."""
    num_blocks: Annotated[
        PositiveInt | None, _memory("KV blocks; overrides bytes and fraction")
    ] = None
    """For tests and benchmarks."""
    prefix_caching: Annotated[bool, _memory("compute every prompt in full")] = True
    kv_host_bytes: Annotated[
        PositiveInt | None,
        _memory(
            "pinned host memory for what the KV cache of a GPU evicts, read back where that is "
            "quicker than computing; unset: none. On a processor raise --kv-cache-bytes instead"
        ),
    ] = None
    kv_disk: Annotated[
        Path | None,
        _memory(
            "a folder: prefixes that are used again are kept there, and read where that is quicker "
            "than computing them. Unset: nowhere"
        ),
    ] = None
    """See `engine.tiers`."""
    kv_disk_bytes: Annotated[
        PositiveInt, _memory("most that the files of one engine in --kv-disk take")
    ] = 16 * 2**30
    kv_disk_encrypted: Annotated[
        bool,
        _memory(
            "encrypt what lies in --kv-disk (AES-256-GCM), under a key derived from the gateway's "
            "secret, or of --kv-key-file"
        ),
    ] = False
    cache_lease_share: Annotated[
        Share,
        _memory("KV blocks that one tenant may have kept for a time, of all; 0: nothing is kept"),
    ] = 0.25
    poison_freed_blocks: Annotated[
        bool, _memory("overwrite freed KV blocks with NaN, to find who reads them; slow")
    ] = False
    num_threads: Annotated[
        PositiveInt | None, _process("CPU threads for matrix work; unset: torch's choice")
    ] = None
    step_timeout_s: Annotated[
        StepTimeout | None,
        _process(
            "longer than any step; an engine silent for so long is given up, and killed when it "
            "was silent twice as long. Unset: derived from the model's size"
        ),
    ] = None

    def to_flags(self) -> list[str]:
        """Return the command line that gives an engine these options, without the defaults."""
        flags: list[str] = []
        for option in engine_options():
            value = getattr(self, option.name)
            if value != option.default:
                flags += [option.flag] if option.kind is bool else [option.flag, str(value)]
        return flags


class Option(NamedTuple):
    """One field of `EngineOptions`, as the flags, the checks and the documentation need it."""

    name: str
    group: str
    help: str
    kind: type
    """bool, int, float, str or Path."""
    choices: tuple[str, ...]
    """Empty: any value of its kind within the bound."""
    bound: Meta
    default: Any

    @property
    def flag(self) -> str:
        """Its flag; one that is on by itself is switched off by `--no-...`."""
        return f"--{'no-' if self.default is True else ''}{self.name.replace('_', '-')}"

    @property
    def bound_in_words(self) -> str:
        """The bound as it stands in "0 is not positive"; empty where there is none."""
        if (self.kind, self.bound.ge) == (int, 1):
            return "positive"
        parts = (
            ("above", self.bound.gt),
            ("at least", self.bound.ge),
            ("below", self.bound.lt),
            ("at most", self.bound.le),
        )
        return " and ".join(f"{words} {limit}" for words, limit in parts if limit is not None)

    def allows(self, number: float) -> bool:
        """Return whether a number is within the bound; NaN is within none."""
        gt, ge, lt, le = self.bound.gt, self.bound.ge, self.bound.lt, self.bound.le
        return (
            (gt is None or number > gt)
            and (ge is None or number >= ge)
            and (lt is None or number < lt)
            and (le is None or number <= le)
        )


@cache
def engine_options() -> tuple[Option, ...]:
    """Return what the table says of each option, in its order."""
    hints = get_type_hints(EngineOptions, include_extras=True)
    return tuple(
        _to_option(field.name, hints[field.name], field.default)
        for field in msgspec.structs.fields(EngineOptions)
    )


def _to_option(name: str, hint: Any, default: Any) -> Option:
    kind, *said = get_args(hint)
    if get_origin(kind) in (Union, UnionType):  # with None, for unset
        kind = next(each for each in get_args(kind) if each is not NoneType)
    if get_origin(kind) is Annotated:
        kind, *bounds = get_args(kind)
        said = bounds + said
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    return Option(
        name=name,
        group=said[-1].extra["group"],
        help=said[-1].description,
        kind=str if choices else kind,
        choices=choices,
        bound=said[0],
        default=default,
    )
