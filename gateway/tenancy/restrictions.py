"""What narrows an API key beside its scopes and its plan, and which models a project may use: the
rules of such values. Pure.

Above: `keys`, `key_changes`, `model_permissions`, `origins`. Below: `gateway.networks`. Knows no
table: a value that is in order here is stored as it is returned.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from gateway.networks import read_network
from gateway.principal import UNLIMITED, Plan
from gateway.tenancy.errors import InvalidField
from gateway.tenancy.plans import LIMITS, MAX_LIMIT

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


class Restrictions(msgspec.Struct, frozen=True, kw_only=True):
    """None: nothing narrows it there."""

    models: list[str] | None = None
    ip_ranges: list[str] | None = None
    """Networks (CIDR) or single addresses."""
    tokens_per_minute: int | None = None
    requests_per_minute: int | None = None
    max_concurrent_streams: int | None = None


UNRESTRICTED = Restrictions()

Mode = Literal["allow_list", "deny_list"]


class ModelPermissions(msgspec.Struct, frozen=True, kw_only=True):
    """`mode` None: all models."""

    mode: Mode | None
    models: list[str]

    @property
    def allowed(self) -> frozenset[str] | None:
        """None: all that are not denied."""
        return frozenset(self.models) if self.mode == "allow_list" else None

    @property
    def denied(self) -> frozenset[str]:
        return frozenset(self.models if self.mode == "deny_list" else ())


def check_restrictions(wanted: Restrictions) -> dict[str, Any]:
    """As columns. Raises: InvalidField."""
    row: dict[str, Any] = {
        "models": None if wanted.models is None else check_models(wanted.models, minimum=1),
        "ip_ranges": None if wanted.ip_ranges is None else check_ip_ranges(wanted.ip_ranges),
    }
    return row | {limit: check_limit(limit, getattr(wanted, limit)) for limit in LIMITS}


def check_models(models: Iterable[str], *, minimum: int = 0) -> list[str]:
    """Sorted, without doubles; they need not be served yet. Raises: InvalidField."""
    wanted = sorted(set(models))
    if not minimum <= len(wanted) <= MAX_MODELS:
        raise InvalidField("models", f"must be {minimum} to {MAX_MODELS} models")
    for model in wanted:
        if not 1 <= len(model) <= MAX_MODEL_LENGTH or not model.isprintable():
            raise InvalidField("models", f"a name has 1 to {MAX_MODEL_LENGTH} printable characters")
    return wanted


def check_ip_ranges(ranges: Iterable[str]) -> list[str]:
    """In the order they came, without doubles, as networks. Raises: InvalidField."""
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
    """Exact origins as browsers write them (RFC 6454, section 6.2): no path, no wildcard, no
    default port, and never `null`, which is everybody's.

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
    for limit in LIMITS:
        known = [n for n in (getattr(plan, limit), own[limit]) if n is not None]
        limits[limit] = min(known, default=None)
    name = "own" if plan is UNLIMITED else plan.name
    return msgspec.structs.replace(plan, name=name, **limits)
