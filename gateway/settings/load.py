"""Reads the operator's configuration once and freezes it: a TOML file, then TOLLGATE_*, then flags.

A later source wins over an earlier one. A key that is not known is refused by name, never ignored,
and so is a TOLLGATE_* variable. Relative paths are the working folder's.

A secret that stands in the environment (an upstream's key) stays there: settings hold its name.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import msgspec

from engine.protocol import Lane
from gateway.home import Home
from gateway.lanes import SloTable
from gateway.net.listener import is_loopback, origin
from gateway.networks import read_network
from gateway.principal import Plan
from gateway.settings.cells import problem_of
from gateway.settings.file import (
    NAME_PATTERN,
    PlainSettings,
    Scalars,
    SettingsError,
    SettingsFile,
    WrittenModel,
    WrittenPlan,
    WrittenWebhook,
    decode_path,
    explain,
    may_be_path,
    one_line,
)
from gateway.settings.mcp_servers import MCP_CALLS, check_mcp_servers, priced_as
from gateway.settings.models import (
    PACKAGE_ROOT,
    ModelConfig,
    ReplicaConfig,
    alone,
    check_parts,
    to_models,
)
from gateway.settings.origins import SettingOrigins, origins_of
from gateway.settings.planner import PlannerConfig, device_kind
from gateway.settings.sealed_keys import open_key

DEFAULT_MODEL = Path("models/penny")
DEFAULT_CONFIG = Path("tollgate.toml")
DEFAULT_PLAN = Plan(
    name="default",
    tokens_per_minute=1_000_000,
    requests_per_minute=10_000,
    max_concurrent_streams=256,
)
MAX_CONFIG_BYTES = 1024 * 1024
MAX_SECRET_BYTES = 16 * 1024


LANES: tuple[Lane, ...] = get_args(Lane)


class Settings(PlainSettings, frozen=True, kw_only=True):
    """Complete: every default is filled in, every path absolute."""

    home: Path
    secret_key_file: Path
    models: tuple[ModelConfig, ...]
    plans: tuple[Plan, ...]
    webhooks: tuple[WrittenWebhook, ...] = ()
    """The one named "default" binds the keys of the first start."""
    price_books: tuple[Path, ...]
    """Those that come with Tollgate, then the configured ones."""
    stored_prices: dict[str, dict[str, Any]] = {}
    """The price books that operators stored beside them: the tables of each by its name."""
    file_lanes: tuple[Lane, ...] = ()
    """The lanes whose deadline the file gives."""
    origins: SettingOrigins = SettingOrigins()

    @property
    def issuer(self) -> str:
        """Scheme, host and port, without a slash behind them."""
        return self.public_url or origin(self.host, self.port)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every name that customers may ask for; adapters follow their base."""
        names = ((model.name, *(each.name for each in model.adapters)) for model in self.models)
        return tuple(chain.from_iterable(names))

    @property
    def slos(self) -> SloTable:
        own = {
            name: model.slo
            for model in self.models
            for name in (model.name, *(each.name for each in model.adapters))
        }
        return SloTable(self.slo, own)

    @property
    def bases(self) -> dict[str, str]:
        """The base's name, by the adapter's; and of what MCP servers are priced as."""
        adapters = {each.name: model.name for model in self.models for each in model.adapters}
        return adapters | {priced_as(each.name): MCP_CALLS for each in self.mcp.servers}


FROM_ENVIRONMENT = {f"TOLLGATE_{name.upper()}": name for name in Scalars.__struct_fields__}
POINTERS = {"TOLLGATE_CONFIG": "config", "TOLLGATE_MODEL": "model"}
"""A file to read, and one model, a folder or a repository, in the place of all configured ones."""
OF_COMMANDS = ("TOLLGATE_API_KEY", "TOLLGATE_ADMIN_KEY")
"""Variables that client commands read; they are no settings."""
SERVICE_LINK = re.compile(
    r"TOLLGATE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""Variables that Kubernetes sets in every container for a Service whose name begins with tollgate
(kubernetes.io/docs, "Service", environment variables), besides those of `SERVICE_ADDRESS`."""
SERVICE_ADDRESS = re.compile(r"TOLLGATE_(\w+_)?PORT=(tcp|udp|sctp)://.*", re.ASCII | re.DOTALL)


def config_path(
    flags: Mapping[str, str | int | Path | None], environ: Mapping[str, str] = os.environ
) -> Path:
    """The file that `load` reads, which may be missing."""
    return Path(str(flags.get("config") or environ.get("TOLLGATE_CONFIG") or DEFAULT_CONFIG))


class SettingsReport(msgspec.Struct, frozen=True, kw_only=True):
    """The settings, and what was read of them."""

    settings: Settings
    file: SettingsFile
    """The file, the variables and the flags together, with every default."""
    path: Path | None
    """The file; None where there is none."""
    sources: dict[str, str]
    """The variable or the flag that gives a key, by the key, where one does."""


def load(
    flags: Mapping[str, str | int | Path | None], environ: Mapping[str, str] = os.environ
) -> Settings:
    """Read everything once. `flags`: names of settings, and `config`, `model` and `revision` (of
    `model`); None is not given.

    An empty variable counts as not set. Raises: SettingsError.
    """
    return load_report(flags, environ).settings


def load_report(
    flags: Mapping[str, str | int | Path | None], environ: Mapping[str, str] = os.environ
) -> SettingsReport:
    """Read what `load` reads, and keep where each key comes from. Raises: SettingsError."""
    given = {name: value for name, value in flags.items() if value is not None}
    named = _read_environment(environ)
    config = given.pop("config", named.pop("config", None))
    model = given.pop("model", named.pop("model", None))
    revision = given.pop("revision", None)
    if revision is not None and model is None:
        raise SettingsError("--revision: only for a model that --model or TOLLGATE_MODEL names")
    for option, path in (("config", config), ("model", model)):
        if path is not None and not may_be_path(str(path)):
            raise SettingsError(f"{option}: {one_line(repr(str(path)))} is no path")
    if revision is not None and re.match(NAME_PATTERN, str(revision)) is None:
        raise SettingsError(f"--revision: {one_line(repr(str(revision)))} is no revision")
    table, source = _read_file(None if config is None else Path(config))
    sources = {name: f"TOLLGATE_{name.upper()}" for name in named}
    sources |= {name: f"--{name.replace('_', '-')}" for name in given}
    for name, value in (named | given).items():
        table[name] = _convert_one(name, value, sources[name])
    try:
        file = msgspec.convert(table, SettingsFile, dec_hook=decode_path)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{source}: {explain(error)}") from None
    only = None if model is None else alone(str(model), revision)
    try:
        settings = _complete(file, only)
        lanes = tuple(each for each in LANES if each in table.get("deadlines", {}))
        settings = msgspec.structs.replace(settings, file_lanes=lanes)
    except SettingsError as error:
        key, _, complaint = str(error).partition(": ")
        where = f"{sources[key]}: {complaint}" if key in sources else f"{source}: {error}"
        raise SettingsError(where) from None
    if only is not None:
        file = msgspec.structs.replace(file, model=[only])
        sources["model"] = "--model" if flags.get("model") is not None else "TOLLGATE_MODEL"
    path = config_path(flags, environ)
    report = SettingsReport(
        settings=settings, file=file, path=path if path.exists() else None, sources=sources
    )
    settings = msgspec.structs.replace(settings, origins=SettingOrigins(tuple(origins_of(report))))
    return msgspec.structs.replace(report, settings=settings)


class SavedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings as the workers of `tollgate up` read them. `number` grows with each reload."""

    number: int
    settings: Settings


def save(saved: SavedSettings, path: Path) -> None:
    """Write what `restore` reads, for this user only: a database URL may hold a password."""
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(msgspec.json.encode(saved, enc_hook=str))
    fresh.rename(path)


def restore(path: Path) -> SavedSettings:
    """Read back what `save` wrote. Raises: OSError, msgspec.DecodeError."""
    return msgspec.json.decode(path.read_bytes(), type=SavedSettings, dec_hook=decode_path)


class SecretMissing(SettingsError):
    """An error of settings that name a variable which this process was not given."""


def read_secret(variable: str, field: str = "api_key_env") -> str:
    """The value of the environment variable an operator named in `field`. Raises: SettingsError if
    unset."""
    value = os.environ.get(variable, "")
    if not value:
        raise SecretMissing(f"{field}: the environment variable {variable} is not set")
    return value


def read_api_key(replica: ReplicaConfig, secret_file: Path) -> str | None:
    """Return the key of an upstream, from where the operator put it; None: it wants none.
    `secret_file`: of the installation, under which a key may be sealed. Raises: SettingsError."""
    if replica.sealed_key is not None:
        return open_key(replica.sealed_key, replica.upstream, secret_file)
    if replica.api_key_env is not None:
        return read_secret(replica.api_key_env)
    if replica.api_key_file is None:
        return None
    return read_secret_file(replica.api_key_file, "api_key_file")


def read_secret_file(path: Path, field: str) -> str:
    """Return the secret that a file of the operator's holds, one line. Raises: SettingsError."""
    where = f"{field}: {path}"
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise SettingsError(f"{where}: not a file")
        with path.open("rb") as file:
            content = file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"{where}: {error.strerror}") from None
    key = content.decode("ascii", errors="replace").strip()
    if not key or len(content) > MAX_SECRET_BYTES or not (key.isascii() and key.isprintable()):
        raise SettingsError(f"{where}: must hold one line of at most {MAX_SECRET_BYTES} characters")
    return key


def own_environment() -> Mapping[str, str]:
    """Return this process's environment, of which children get a part (`child_environment`)."""
    return os.environ


def _read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    known = FROM_ENVIRONMENT | POINTERS
    found: dict[str, Any] = {}
    for variable, value in environ.items():
        if not variable.startswith("TOLLGATE_") or variable in OF_COMMANDS:
            continue
        if SERVICE_LINK.fullmatch(variable) or SERVICE_ADDRESS.fullmatch(f"{variable}={value}"):
            continue
        if variable not in known:
            raise SettingsError(f"{variable}: unknown; known are {', '.join(sorted(known))}")
        if not is_text(value):
            raise SettingsError(f"{variable}: not UTF-8")
        if value:
            found[known[variable]] = value
    return found


def is_text(value: str) -> bool:
    """Tell whether a variable or an argument of this process was UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_file(config: Path | None) -> tuple[dict[str, Any], str]:
    """The file's table, and the name errors give it. Without `config` the file may be missing."""
    path = config or DEFAULT_CONFIG
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
    except FileNotFoundError:
        if config is None:
            return {}, "settings"
        raise SettingsError(f"config: {path} does not exist") from None
    except OSError as error:
        raise SettingsError(f"config: {path}: {error.strerror}") from None
    if len(content) > MAX_CONFIG_BYTES:
        raise SettingsError(f"config: {path} is larger than {MAX_CONFIG_BYTES} bytes")
    try:
        return tomllib.loads(content.decode()), str(path)
    except UnicodeDecodeError:
        raise SettingsError(f"{path}: not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path}: not TOML: {one_line(str(error))}") from None
    except RecursionError:
        raise SettingsError(f"{path}: it is nested too deep") from None


def _convert_one(name: str, value: Any, source: str) -> Any:
    """A variable or a flag, which are text, as the type of the key it stands for."""
    if name not in Scalars.__struct_fields__:
        raise SettingsError(f"{source}: unknown")
    try:
        found = msgspec.convert({name: str(value)}, Scalars, strict=False, dec_hook=decode_path)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{source}: {explain(error).partition(': ')[2]}") from None
    return msgspec.to_builtins(getattr(found, name), enc_hook=str)


def _complete(file: SettingsFile, only: WrittenModel | None) -> Settings:
    """Raises: SettingsError, which begins with the key."""
    home = file.home.absolute()
    written = file.model
    if only is not None or not written:
        written = [only or alone(str(DEFAULT_MODEL))]
    cell = file.cell
    if (problem := problem_of(cell, file.fleet.join_listen)) is not None:
        raise SettingsError(problem)
    models = to_models(written, file.engine, Home(home), () if cell is None else cell.peer)
    check_parts(models, file.workers)
    for position, model in enumerate(models):
        if model.joined and file.fleet.join_listen is None:
            raise SettingsError(
                f"model[{position}].joined: wants fleet.join_listen, where they come"
            )
        if model.prefill and not file.fleet.fetch:
            raise SettingsError(
                f"model[{position}].prefill: wants fleet.fetch, by which the others read prompts"
            )
        if model.prefill and not model.engine_options.prefix_caching:
            raise SettingsError(
                f"model[{position}].prefill: wants engine_options.prefix_caching, what is read"
            )
    _check_devices(models, file.fleet.planner)
    plans = {name: _to_plan(name, table) for name, table in file.plan.items()}
    plans.setdefault(DEFAULT_PLAN.name, DEFAULT_PLAN)
    database_url = None if file.database_url is None else _database_url(file.database_url)
    if file.redis_url is not None:
        _check_redis_url(file.redis_url)
    if file.public_url is not None:
        _check_public_url(file.public_url)
    _check_trusted_proxies(file.trusted_proxies)
    if file.metrics.tenants and file.metrics.port is None:
        raise SettingsError("metrics.tenants: wants metrics.port, or clients read what all spend")
    names = [model.name for model in models]
    drift = file.mcp.stdio.unpinned == "warn"
    check_mcp_servers(file.mcp.servers, names, near=file.egress_to_loopback, drift=drift)
    for field in ("search_model", "scan_model"):
        if (model := getattr(file.mcp, field)) not in (None, *names):
            raise SettingsError(f"mcp.{field}: {model!r} is no model")
    shipped = sorted((PACKAGE_ROOT / "billing" / "pricing" / "price_books").glob("*.toml"))
    plain = {name: getattr(file, name) for name in PlainSettings.__struct_fields__}
    complete = {
        "home": home,
        "database_url": database_url,
        "cell": None if cell is None else cell.with_absolute_paths(),
        "secret_key_file": (file.secret_key_file or Home(home).secret).absolute(),
        "price_books": (
            *shipped,
            Home(home).price_books,
            *(path.absolute() for path in file.price_books),
        ),
    }
    return Settings(
        **plain | complete,
        models=models,
        plans=tuple(plans.values()),
        webhooks=_to_webhooks(file.webhook),
    )


def _to_webhooks(written: Sequence[WrittenWebhook]) -> tuple[WrittenWebhook, ...]:
    names = Counter((each.org, each.name) for each in written)
    for (_, name), count in names.items():
        if count > 1:
            raise SettingsError(f"webhook: two are named {name!r}")
    return tuple(
        msgspec.structs.replace(each, secret_file=each.secret_file.absolute()) for each in written
    )


def _to_plan(name: str, table: Any) -> Plan:
    try:
        limits = msgspec.convert(table, WrittenPlan)
    except msgspec.ValidationError as error:
        raise SettingsError(explain(error, f"plan.{name}")) from None
    return Plan(name=name, **msgspec.structs.asdict(limits))


def _database_url(url: str) -> str:
    from gateway.db import normalise  # SQLAlchemy: not for a start that needs no URL

    try:
        return normalise(url)
    except ValueError as error:
        raise SettingsError(f"database_url: {error}") from None


def _check_devices(models: Sequence[ModelConfig], planner: PlannerConfig) -> None:
    """Check that no device is named twice, and that the bytes of each engine there are known."""
    names = [each.name for each in planner.devices]
    for position, name in enumerate(names):
        if name in names[:position]:
            raise SettingsError(f"fleet.planner.devices[{position}].name: two are named {name}")
    for position, model in enumerate(models):
        options = model.engine_options
        if not model.starts_engine or device_kind(options.device, planner.devices) is None:
            continue
        if options.kv_cache_bytes is None:
            raise SettingsError(
                f"model[{position}].engine_options.kv_cache_bytes: wanted by fleet.planner.devices,"
                f" or nobody knows what an engine of {model.name} takes"
            )


def _check_public_url(url: str) -> None:
    """Check that tokens and sessions never cross a network in the clear (RFC 8414, section 2)."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, 0
    if host is None or port == 0 or url != url.lower() or not url.isascii():
        raise SettingsError("public_url: must be a lower-case ASCII host and a port, if any")
    if parts.scheme == "http" and not is_loopback(host):
        raise SettingsError("public_url: http is for this machine alone; elsewhere it is https")


def _check_trusted_proxies(ranges: Sequence[str]) -> None:
    for position, each in enumerate(ranges):
        try:
            read_network(each)
        except ValueError as error:
            raise SettingsError(f"trusted_proxies[{position}]: {error}") from None


def _check_redis_url(url: str) -> None:
    """The parts are never quoted: where one is wrong, another may hold the password."""
    found = urlsplit(url)
    try:
        number = found.port
    except ValueError:
        number = -1
    if number == -1 or "@" in found.path + found.query + found.fragment:
        raise SettingsError(
            "redis_url: its port is not a number (a '/', '#' or '?' in the password is written "
            "%2F, %23, %3F)"
        )
