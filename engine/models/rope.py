"""Reads theta, scaling and window of a rotary position embedding from config.json."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import msgspec

from engine.errors import ConfigError, UnsupportedModel
from engine.layers.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
)

DEFAULT_THETA = 10_000.0
MAX_WINDOW = 2**24
"""float32 tells all positions below it apart."""
KINDS: dict[str, type[RopeScaling] | None] = {
    "default": None,
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "dynamic": DynamicScaling,
    "yarn": YarnScaling,
    "longrope": LongRopeScaling,
    "su": LongRopeScaling,  # its first name, in older Phi-3 checkpoints
}


class Rope(NamedTuple):
    theta: float
    scaling: RopeScaling | None
    window: int
    """The longest text in tokens."""


def read_rope(
    parameters: dict[str, Any],
    *,
    theta: float | None,
    max_position_embeddings: int,
    original_max_position_embeddings: int | None,
    rotary_dim: int,
) -> Rope:
    """parameters: `rope_parameters`, or `rope_scaling` of transformers 4, where `rope_type` used to
    be called `type`. The rest stands beside them in config.json; Phi-3 names the original length
    there, and it counts more than the one in `parameters`.

    Raises ConfigError that names the field, UnsupportedModel for what is not built here.
    """
    given = {name: value for name, value in parameters.items() if value is not None}
    kind = given.get("rope_type") or given.get("type") or "default"
    _refuse_unsupported(given, kind)
    chosen = KINDS[kind]
    if chosen is DynamicScaling:
        given["original_max_position_embeddings"] = max_position_embeddings
    elif original_max_position_embeddings is not None:
        given["original_max_position_embeddings"] = original_max_position_embeddings
    original = given.setdefault("original_max_position_embeddings", max_position_embeddings)
    if chosen in (YarnScaling, LongRopeScaling) and isinstance(original, int) and original > 0:
        given.setdefault("factor", max(1.0, max_position_embeddings / original))
    base = given.get("rope_theta") or theta or DEFAULT_THETA
    if isinstance(base, bool) or not isinstance(base, int | float) or not 1 < base < math.inf:
        raise _error(kind, f"rope_theta must be a finite number above 1, not {base!r}")
    try:
        scaling = None if chosen is None else msgspec.convert(given, chosen)
    except msgspec.ValidationError as error:
        raise _error(kind, str(error)) from error
    if scaling is not None:
        _check_scaling(kind, scaling, rotary_dim)
    return Rope(float(base), scaling, _window(kind, scaling, max_position_embeddings))


def _error(kind: str, what: str) -> ConfigError:
    return ConfigError(f"config.json: rope parameters ({kind}): {what}")


def _refuse_unsupported(given: dict[str, Any], kind: object) -> None:
    if not isinstance(kind, str) or kind not in KINDS:
        known = ", ".join(KINDS)
        raise UnsupportedModel(f"config.json: rope_type {kind!r} is not supported ({known})")
    nested = next((name for name, value in given.items() if isinstance(value, dict)), None)
    if nested is not None:
        what = f"rope parameters of their own for layers of type {nested!r}"
        raise UnsupportedModel(f"config.json: {what} are not supported")


def _check_scaling(kind: str, scaling: RopeScaling, rotary_dim: int) -> None:
    """Refuse single values that fit and do not fit together."""
    for name, value in msgspec.structs.asdict(scaling).items():
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(number is None or math.isfinite(number) for number in numbers):
            raise _error(kind, f"{name} must be finite")
    match scaling:
        case LongRopeScaling():
            lists = {"short_factor": scaling.short_factor, "long_factor": scaling.long_factor}
            for name, factors in lists.items():
                if len(factors) != rotary_dim // 2:
                    what = f"{name} has {len(factors)} numbers, {rotary_dim // 2} are asked for"
                    raise _error(kind, what)
        case YarnScaling() if scaling.beta_fast < scaling.beta_slow:
            raise _error(kind, f"beta_fast {scaling.beta_fast} is below beta_slow")
        case Llama3Scaling() if scaling.high_freq_factor <= scaling.low_freq_factor:
            what = f"high_freq_factor {scaling.high_freq_factor} must be above low_freq_factor"
            raise _error(kind, what)
        case DynamicScaling() if rotary_dim <= 2:
            raise _error(kind, f"more than 2 channels must be rotated, not {rotary_dim}")
        case _:
            pass


def _window(kind: str, scaling: RopeScaling | None, max_position_embeddings: int) -> int:
    """Return max_position_embeddings, or the stretched original length where that is longer: some
    checkpoints (Qwen2.5 with YaRN) keep the original one in max_position_embeddings. Linear and
    Llama 3's scaling are trained in: max_position_embeddings is their stretched length."""
    if not isinstance(scaling, DynamicScaling | YarnScaling | LongRopeScaling):
        return max_position_embeddings
    stretched = scaling.factor * scaling.original_max_position_embeddings
    if stretched > MAX_WINDOW:
        what = f"factor {scaling.factor} makes a window of {stretched:.0f} positions"
        raise _error(kind, f"{what}, more than {MAX_WINDOW}")
    return max(max_position_embeddings, int(stretched))
