"""Compares two settings: what changed, as a person reads it, and what each change takes.

Shows no password, no query of a URL, and none of the values that are handed to programs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import FieldInfo

from gateway.settings.child_environment import secret_variables
from gateway.settings.file import SettingsError, one_line
from gateway.settings.load import Settings
from gateway.settings.models import ModelConfig

Effect = Literal["live", "commands", "workers", "restart"]
"""`live`: running workers take it up. `commands`: no process that runs has it, commands read it as
they start. `workers`: workers are replaced one by one, without refusing a connection. `restart`: it
binds the whole installation, so a reload refuses it."""

FIXED = frozenset[Effect]({"workers", "restart"})

EFFECTS: Mapping[str, Effect] = {
    "home": "restart",
    "host": "restart",
    "port": "restart",
    "database_url": "restart",
    "redis_url": "restart",
    "secret_key_file": "restart",
    "models": "live",
    "plans": "live",
    "webhooks": "live",
    "price_books": "live",
    "stored_prices": "live",
    "deadlines": "live",
    "slo": "live",
    "max_disputed_in_a_row": "live",
    "disputed_rest_s": "live",
    "compat.unknown_fields": "live",
    "compat.dialect": "live",
    "compat.hosted_tools": "workers",
    "mcp.servers": "live",
    "mcp.loop": "live",
    "mcp.max_catalogue_tokens": "live",
    "mcp.search_model": "live",
    "mcp.scan_model": "live",
    "mcp.stdio": "workers",
    "model_cache": "commands",
    "backup": "commands",
    "workers": "workers",
    "public_url": "workers",
    "egress_to_loopback": "workers",
    "trusted_proxies": "workers",
    "root_path": "workers",
    "max_body_bytes": "workers",
    "drain_timeout_s": "workers",
    "stalled_reader_s": "workers",
    "stream_interval_s": "workers",
    "response_lifetime_days": "workers",
    "max_file_bytes": "workers",
    "max_org_file_bytes": "workers",
    "max_batch_lines": "workers",
    "max_batch_bytes": "workers",
    "batch_concurrency": "workers",
    "file_store": "workers",
    "fleet": "workers",
    "ray": "workers",
    "cell": "workers",
    "log_level": "workers",
    "logs.format": "workers",
    "logs.access": "workers",
    "logs.client_address": "workers",
    "logs.stdout": "restart",
    "logs.max_bytes": "restart",
    "logs.keep": "restart",
    "requests": "workers",
    "spool": "workers",
    "metrics.host": "restart",
    "metrics.port": "restart",
    "metrics.tenants": "workers",
    "mail": "workers",
    "traces": "workers",
}
"""The effect of each setting that is given, by the file or beside it; of a table named here by its
keys, that of each key."""
WITHIN: Mapping[str, Effect] = {"fleet.planner.devices": "restart"}
"""The effect of a part of a table that has another one than the rest. An engine that runs is on the
device that it was begun on, and counted there."""

NAMED = frozenset({"models", "plans", "webhooks", "mcp.servers"})
"""Lists whose entries are known by their names: their order means nothing."""
HIDDEN = frozenset({"environment", "args", "database_url", "redis_url", "sealed_key"})
"""Their values may be secrets."""
PRIVATE_PART = re.compile(r"(?<=://)[^/\s?#@]*@|\?[^\s#]*")
"""The user and password of a URL, and its query."""
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
"""A key of TOML that needs no quotes."""
ASSIGNED = frozenset(
    {
        *("engines", "joined", "prefill", "replica_range", "joined_range", "is_asleep"),
        *("borrowed", "wakes_in_s", "starts_engine", "shares_memory"),
    }
)
"""Fields of a model that nobody writes so: what made them stands in `_as_in_file`."""
ABSENT = object()


class SettingChange(msgspec.Struct, frozen=True, kw_only=True):
    """One change. `before` and `after` are as in the file, and may be shown; None: there is
    nothing."""

    path: str
    effect: Effect
    before: str | None
    after: str | None

    def __str__(self) -> str:
        if self.before is None:
            return f"+ {self.path} = {self.after}"
        if self.after is None:
            return f"- {self.path} = {self.before}"
        return f"~ {self.path}: {self.before} -> {self.after}"


def changes_between(old: Settings, new: Settings) -> tuple[SettingChange, ...]:
    """Return what differs, in the order of the settings."""
    found: list[SettingChange] = []
    for name, effect in EFFECTS.items():
        before, after = (_value(each, name) for each in (old, new))
        for path, was, now in _differences(name, before, after, by_name=name in NAMED):
            own = next((it for part, it in WITHIN.items() if path.startswith(part)), effect)
            found.append(
                SettingChange(path=path, effect=own, before=_shown(was), after=_shown(now))
            )
    return tuple(found)


def refuse_what_is_fixed(old: Settings, new: Settings) -> None:
    """Refuse what a process that runs alone cannot take up. Raises: SettingsError."""
    fixed = [each.path for each in changes_between(old, new) if each.effect in FIXED]
    if fixed:
        raise SettingsError(f"{', '.join(fixed)}: needs a restart")


def needs_new_workers(old: Settings, new: Settings) -> bool:
    """Tell whether running workers cannot take up what changed: some of it is fixed when a process
    starts, or names a variable of the environment that they were not given."""
    unknown = set(secret_variables(new)) - set(secret_variables(old))
    effects = {each.effect for each in changes_between(old, new)}
    return bool(unknown) or "workers" in effects


def _value(settings: Settings, name: str) -> Any:
    found: Any = settings
    for part in name.split("."):
        found = getattr(found, part)
    return _written(found)


def _written(value: Any) -> Any:
    """Return a setting as builtins, without what stands at its default."""
    if isinstance(value, msgspec.Struct):
        given = ASSIGNED if isinstance(value, ModelConfig) else ()
        found = ((field, getattr(value, field.name)) for field in msgspec.structs.fields(value))
        table = {
            field.name: _written(it)
            for field, it in found
            if it != _default_of(field) and field.name not in given
        }
        return _as_in_file(value, table) if isinstance(value, ModelConfig) else table
    if isinstance(value, list | tuple):
        return [_written(each) for each in value]
    return msgspec.to_builtins(value, enc_hook=str)


def _as_in_file(model: ModelConfig, table: dict[str, Any]) -> dict[str, Any]:
    """Return a model as people write it: an engine that others run is told by its address, those
    that are started here by how many they are; one upstream by keys of the model, several by tables
    `replica`, and the name at the upstream only where it is another."""
    replicas: list[dict[str, Any]] = table.pop("replicas", [])
    for each in (table, *table.get("adapters", ())):
        if source := each.pop("source", None):
            each["path"] = source
    if model.replica_range is not None:
        table["replicas"] = str(model.replica_range)
    elif model.prefill:
        table |= _by_role(model, model.started)
    elif model.starts_engine and len(model.started) != 1:
        table["replicas"] = len(model.started)
    if model.joined and model.prefill:
        table["joined"] = _by_role(model, model.joined)
    elif model.joined:
        table["joined"] = str(model.joined_range) if model.joined_range else len(model.joined)
    elif model.engines and not model.starts_engine:
        table["engine"] = model.engines[0]
    for each in replicas:
        if each["upstream_model"] == model.name:
            del each["upstream_model"]
    if len(replicas) == 1:
        return table | replicas[0]
    return table | {"replica": replicas} if replicas else table


def _by_role(model: ModelConfig, engines: Sequence[str]) -> dict[str, int]:
    """Return how many of some of its engines have which role."""
    return dict(Counter(model.role_of(each) for each in engines))


def _default_of(field: FieldInfo) -> Any:
    made = field.default_factory
    return field.default if made is msgspec.NODEFAULT else made()


def _differences(
    path: str, old: Any, new: Any, *, by_name: bool = False
) -> Iterator[tuple[str, Any, Any]]:
    if by_name:
        old, new = _by_name(old), _by_name(new)
    if old == new:
        return
    if isinstance(old, dict) and isinstance(new, dict) and path.split(".")[-1] not in HIDDEN:
        for key in (*old, *(key for key in new if key not in old)):
            before, after = old.get(key, ABSENT), new.get(key, ABSENT)
            if not by_name and isinstance(before if after is ABSENT else after, dict):
                # A table whose keys all stand at their defaults is there all the same.
                before, after = ({} if each is ABSENT else each for each in (before, after))
            yield from _differences(f"{path}.{key}", before, after)
    elif are_tables(old) and are_tables(new) and len(old) == len(new):
        for position, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from _differences(f"{path}[{position}]", before, after)
    else:
        hidden = path.split(".")[-1] in HIDDEN
        yield path, _hidden(old) if hidden else old, _hidden(new) if hidden else new


def _by_name(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        each["name"]: {key: it for key, it in each.items() if key != "name"} for each in entries
    }


def are_tables(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def _hidden(value: Any) -> Any:
    return value if value in (None, ABSENT) else "(not shown)"


def _shown(value: Any) -> str | None:
    if value is ABSENT:
        return None
    return one_line(PRIVATE_PART.sub("", _in_toml(public(value))))


def public(value: Any) -> Any:
    """Return a table as it may be shown: without what may be a secret."""
    if isinstance(value, dict):
        return {k: _hidden(inner) if k in HIDDEN else public(inner) for k, inner in value.items()}
    if isinstance(value, list):
        return [public(inner) for inner in value]
    return value


def _in_toml(value: Any) -> str:
    """Return a value as it stands in the file, on one line. What JSON writes of a string, TOML
    reads."""
    if isinstance(value, dict):
        inside = ", ".join(f"{_key(key)} = {_in_toml(it)}" for key, it in value.items())
        return f"{{{inside}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_in_toml, value))}]"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return msgspec.json.encode(value).decode()


def _key(name: str) -> str:
    return name if BARE_KEY.fullmatch(name) else msgspec.json.encode(name).decode()
