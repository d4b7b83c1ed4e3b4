"""Checks what narrows an API key beside its scopes and its plan, and which models a project may
use: the rules of such values. Pure.

Knows no table: a value that is in order here is stored as it is returned.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from foundation.structs import with_fields
from gateway.networks import read_network
from gateway.principal import KEY_LANES, KEY_LIMIT_NAMES, LIMIT_NAMES, MAX_LIMIT, UNLIMITED, Plan
from gateway.tenancy.errors import InvalidField

MAX_MODELS = 200
MAX_MODEL_LENGTH = 512
MAX_IP_RANGES = 64
MAX_ORIGINS = 50
MAX_ORIGIN_LENGTH = 260
ORIGIN_FORM = re.compile(
    r"[a-z][a-z0-9+.-]{0,31}://(?:\[[0-9a-f:.]+\]|[a-z0-9_-]+(?:\.[a-z0-9_-]+)*)(?::([0-9]{1,5}))?",
    re.ASCII,
)
DEFAULT_PORTS = {"http": "80", "https": "443"}

ModelLimits = dict[str, dict[str, int]]
"""By model, which limits a key has there; no model without any."""
ModelLimitsPatch = Mapping[str, Mapping[str, int | None] | None]
"""None takes a limit away, or all of a model's."""


@with_fields(KEY_LIMIT_NAMES, int | None, None, after="ip_ranges")
class Restrictions(msgspec.Struct, frozen=True, kw_only=True):
    """None: nothing narrows it there."""

    models: list[str] | None = None
    ip_ranges: list[str] | None = None
    """Networks (CIDR) or single addresses."""
    lane: str | None = None
    """A `KeyLane`."""
    model_limits: ModelLimitsPatch | None = None
    """Limits for single models, beside the limits above."""
    shows_cost: bool | None = None
    """Its answers say what they cost, or do not. None: as its org has it."""


UNRESTRICTED = Restrictions()

Mode = Literal["allow_list", "deny_list"]


class ModelPermissions(msgspec.Struct, frozen=True, kw_only=True):
    """`mode` None: all models."""

    mode: Mode | None
    models: list[str]

    @property
    def allowed(self) -> frozenset[str] | None:
        """The models that are allowed; None: all that are not denied."""
        return frozenset(self.models) if self.mode == "allow_list" else None

    @property
    def denied(self) -> frozenset[str]:
        return frozenset(self.models if self.mode == "deny_list" else ())


def check_restrictions(wanted: Restrictions) -> dict[str, Any]:
    """Return the restrictions as columns. Raises: InvalidField."""
    row: dict[str, Any] = {
        "models": None if wanted.models is None else check_models(wanted.models, minimum=1),
        "ip_ranges": None if wanted.ip_ranges is None else check_ip_ranges(wanted.ip_ranges),
        "lane": check_lane(wanted.lane),
        "model_limits": check_model_limits(merged_limits(None, wanted.model_limits)),
        "shows_cost": wanted.shows_cost,
    }
    return row | {limit: check_limit(limit, getattr(wanted, limit)) for limit in KEY_LIMIT_NAMES}


def check_models(models: Iterable[str], *, minimum: int = 0) -> list[str]:
    """Return the models sorted, without doubles; they need not be served yet.

    Raises: InvalidField.
    """
    wanted = sorted(set(models))
    if not minimum <= len(wanted) <= MAX_MODELS:
        raise InvalidField("models", f"must be {minimum} to {MAX_MODELS} models")
    for model in wanted:
        check_model("models", model)
    return wanted


def check_model(field: str, name: str) -> None:
    """Raises: InvalidField."""
    if not 1 <= len(name) <= MAX_MODEL_LENGTH or not name.isprintable():
        raise InvalidField(field, f"a name has 1 to {MAX_MODEL_LENGTH} printable characters")


def check_lane(lane: str | None) -> str | None:
    """Raises: InvalidField."""
    if lane is not None and lane not in KEY_LANES:
        raise InvalidField("lane", f"must be {' or '.join(KEY_LANES)}")
    return lane


def merged_limits(known: ModelLimits | None, patch: ModelLimitsPatch | None) -> ModelLimits | None:
    """Return `known` after a merge patch (RFC 7396); None: no limit is left."""
    if patch is None:
        return None
    merged: dict[str, Mapping[str, int | None]] = dict(known or {})
    for model, changes in patch.items():
        merged[model] = {} if changes is None else {**merged.get(model, {}), **changes}
    left = {
        model: {limit: value for limit, value in limits.items() if value is not None}
        for model, limits in merged.items()
    }
    return {model: limits for model, limits in sorted(left.items()) if limits} or None


def check_model_limits(wanted: ModelLimits | None) -> ModelLimits | None:
    """The models need not be served yet. Raises: InvalidField."""
    if wanted is not None and len(wanted) > MAX_MODELS:
        raise InvalidField("model_limits", f"must be limits of at most {MAX_MODELS} models")
    for model, limits in (wanted or {}).items():
        check_model("model_limits", model)
        for limit, value in limits.items():
            if limit not in LIMIT_NAMES:
                raise InvalidField("model_limits", f"a limit is one of {', '.join(LIMIT_NAMES)}")
            check_limit(f"model_limits.{limit}", value)
    return wanted


def plans_by_model(limits: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Plan]:
    """A plan of one model is named for it."""
    return {
        model: msgspec.structs.replace(Plan(name=model), **own)
        for model, own in (limits or {}).items()
    }


def check_ip_ranges(ranges: Iterable[str]) -> list[str]:
    """Return the ranges in the order they came, without doubles, as networks.

    Raises: InvalidField.
    """
    wanted = list(dict.fromkeys(ranges))
    if not 1 <= len(wanted) <= MAX_IP_RANGES:
        raise InvalidField("ip_ranges", f"must be 1 to {MAX_IP_RANGES} ranges")
    try:
        return list(dict.fromkeys(str(read_network(each)) for each in wanted))
    except ValueError as error:
        detail = "must be networks such as 192.0.2.0/24, without bits beyond the prefix"
        raise InvalidField("ip_ranges", str(error), detail=detail) from None


def check_limit(name: str, value: int | None) -> int | None:
    """Raises: InvalidField."""
    if value is not None and not 0 <= value <= MAX_LIMIT:
        raise InvalidField(name, f"must be 0 to {MAX_LIMIT}")
    return value


def check_origins(origins: Iterable[str]) -> list[str]:
    """Check that origins are exact, as browsers write them (RFC 6454, section 6.2): no path, no
    wildcard, no default port, and never `null`, which is everybody's.

    Raises: InvalidField.
    """
    wanted = list(dict.fromkeys(origins))
    if len(wanted) > MAX_ORIGINS:
        raise InvalidField("cors_origins", f"must be at most {MAX_ORIGINS} origins")
    for origin in wanted:
        found = ORIGIN_FORM.fullmatch(origin) if len(origin) <= MAX_ORIGIN_LENGTH else None
        if found is None or int(found[1] or 0) > 65_535:
            raise InvalidField(
                "cors_origins", "an origin is written like 'https://app.example.com' (lower case)"
            )
        scheme = origin.partition(":")[0]
        if found[1] is not None and found[1] == DEFAULT_PORTS.get(scheme):
            raise InvalidField("cors_origins", f"browsers leave out port {found[1]} of {scheme}")
    return wanted


def narrowed(plan: Plan, own: dict[str, int | None]) -> Plan:
    """The smaller of each of a key's own limits and those of its plan."""
    if all(value is None for value in own.values()):
        return plan
    limits: dict[str, int | None] = {}
    for limit in KEY_LIMIT_NAMES:
        known = [n for n in (getattr(plan, limit), own[limit]) if n is not None]
        limits[limit] = min(known, default=None)
    name = "own" if plan is UNLIMITED else plan.name
    return msgspec.structs.replace(plan, name=name, **limits)
