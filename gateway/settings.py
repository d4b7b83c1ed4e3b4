"""What the operator configured, read once and frozen: a TOML file, then TOLLGATE_*, then flags.

Above: `cli`, `supervisor`, `worker`, `app`. Below: the file system and the environment, which
nothing else in the gateway reads. A later source wins over an earlier one. A key that is not known
is refused by name, never ignored, and so is a TOLLGATE_* variable. Relative paths are the working
folder's.

A secret that stands in the environment (an upstream's key) stays there: settings hold its name.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from engine.hub import names_a_repository
from gateway.home import Home
from gateway.principal import Plan

PACKAGE_ROOT = Path(__file__).resolve().parents[1]
"""Where `models/penny` and the price books that come with Tollgate stand."""
DEFAULT_MODEL = Path("models/penny")
DEFAULT_CONFIG = Path("tollgate.toml")
DEFAULT_PLAN = Plan(
    name="default",
    tokens_per_minute=1_000_000,
    requests_per_minute=10_000,
    max_concurrent_streams=256,
)
KV_CACHE_FRACTION = 0.4
"""Of the free memory, for the KV caches of all engines that are started together."""
MAX_CONFIG_BYTES = 1024 * 1024

Name = Annotated[str, Meta(min_length=1, max_length=128)]
URL_PATTERN = r"^https?://[^/\s]+"
REDIS_PATTERN = r"^(redis|rediss|unix)://."
ADDRESS_PATTERN = r"^(unix:.+|tcp:.+:\d+)$"
IN_WORDS = {
    repr(URL_PATTERN): "a URL such as 'http://127.0.0.1:9100/v1'",
    repr(REDIS_PATTERN): "a URL such as 'redis://127.0.0.1:6379/0'",
    repr(ADDRESS_PATTERN): "'unix:/path' or 'tcp:host:port'",
}
Url = Annotated[str, Meta(pattern=URL_PATTERN)]
RedisUrl = Annotated[str, Meta(pattern=REDIS_PATTERN)]
EngineAddress = Annotated[str, Meta(pattern=ADDRESS_PATTERN)]
Limit = Annotated[int, Meta(ge=0, le=1_000_000_000_000)]
PositiveInt = Annotated[int, Meta(ge=1)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
Weight = Annotated[int, Meta(ge=1, le=1000)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Workers = Annotated[int, Meta(ge=1, le=256)]
BodyBytes = Annotated[int, Meta(ge=1024, le=1024**3)]
StepTimeout = Annotated[float, Meta(ge=1, le=86_400)]
DrainTimeout = Annotated[float, Meta(ge=0, le=3600)]
StalledReader = Annotated[float, Meta(ge=1, le=3600)]
LogLevel = Literal["debug", "info", "warning", "error"]


class SettingsError(Exception):
    """One line that names the key, the variable or the flag, and where it stands."""


class _Strict(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the TOML file: what it does not know it refuses."""


class ReplicaConfig(_Strict, frozen=True, kw_only=True):
    """One OpenAI-compatible upstream of a model."""

    upstream: Url
    """Its base URL, `/v1` included."""
    upstream_model: str
    """What the model is called there."""
    api_key_env: str | None = None
    """Name of the environment variable that holds its key; None: it wants none."""
    weight: Weight = 1


class ModelConfig(_Strict, frozen=True, kw_only=True):
    """A model as customers name it: served by our engine (`path` and `engine`) or by `replicas`."""

    name: Name
    path: Path | None = None
    """A Hugging Face folder. Absolute. None for an upstream, and for a repository that is not
    fetched yet (`gateway.fetched`)."""
    repository: str | None = None
    """`org/name` on a hub."""
    revision: str | None = None
    """Of the repository: a branch, a tag or a commit; None: its default branch."""
    engine: EngineAddress | None = None
    """Where its engine listens; set for every model with a path or a repository."""
    starts_engine: bool = False
    """True where `tollgate up` runs that engine; False where somebody else does."""
    replicas: tuple[ReplicaConfig, ...] = ()
    """Tried in weighted order, the next one only before the first byte."""
    context_window: PositiveInt | None = None
    """Tokens; None: the engine says, or the upstream refuses."""
    tokenizer: Path | None = None
    """tokenizer.json or its folder, to count an upstream's input exactly."""


class EngineOptions(_Strict, frozen=True, kw_only=True):
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


class Settings(Struct, frozen=True, kw_only=True):
    """Complete: every default is filled in, every path absolute."""

    home: Path
    host: str = "127.0.0.1"
    port: Port = 8000
    """0: any free one."""
    workers: Workers = 1
    database_url: str | None = None
    """For SQLAlchemy with asyncpg. None: an embedded Postgres under `home`."""
    redis_url: RedisUrl | None = None
    """None: an embedded Valkey under `home`."""
    secret_key_file: Path
    """The versioned secret all gateways share (`gateway.secret`)."""
    models: tuple[ModelConfig, ...]
    plans: tuple[Plan, ...]
    """The one named "default" binds the keys of the first start."""
    engine: EngineOptions = EngineOptions()
    price_books: tuple[Path, ...]
    """Those that come with Tollgate, then the configured ones."""
    max_body_bytes: BodyBytes = 16 * 1024 * 1024
    drain_timeout_s: DrainTimeout = 30.0
    """After SIGTERM: how long open streams may take to end by themselves."""
    stalled_reader_s: StalledReader = 60.0
    """A client that takes nothing for so long is given up, and its connection closed."""
    log_level: LogLevel = "info"


class _Model(_Strict, frozen=True, kw_only=True):
    """`[[model]]` as people write it."""

    name: Name
    path: Path | None = None
    """A folder, or `org/name` on a hub."""
    revision: Name | None = None
    engine: EngineAddress | None = None
    upstream: Url | None = None
    upstream_model: str | None = None
    api_key_env: str | None = None
    replica: list[_Replica] = []
    context_window: PositiveInt | None = None
    tokenizer: Path | None = None


class _Replica(_Strict, frozen=True, kw_only=True):
    """`[[model.replica]]`."""

    upstream: Url
    upstream_model: str | None = None
    api_key_env: str | None = None
    weight: Weight = 1


class _Plan(_Strict, frozen=True, kw_only=True):
    """`[plan.NAME]`."""

    tokens_per_minute: Limit | None = None
    requests_per_minute: Limit | None = None
    max_concurrent_streams: Limit | None = None


class _Scalars(_Strict, frozen=True, kw_only=True):
    """What may stand in the file, the environment and the flags alike."""

    home: Path = Path(".tollgate")
    host: Name = "127.0.0.1"
    port: Port = 8000
    workers: Workers = 1
    database_url: str | None = None
    redis_url: RedisUrl | None = None
    secret_key_file: Path | None = None


class _File(_Scalars, frozen=True, kw_only=True):
    """`tollgate.toml`."""

    model: list[_Model] = []
    plan: dict[Name, Any] = {}
    """Each a `_Plan`; converted one by one, so that an error can name it."""
    engine: EngineOptions = EngineOptions()
    price_books: list[Path] = []
    max_body_bytes: BodyBytes = 16 * 1024 * 1024
    drain_timeout_s: DrainTimeout = 30.0
    stalled_reader_s: StalledReader = 60.0
    log_level: LogLevel = "info"


FROM_ENVIRONMENT = {f"TOLLGATE_{name.upper()}": name for name in _Scalars.__struct_fields__}
POINTERS = {"TOLLGATE_CONFIG": "config", "TOLLGATE_MODEL": "model"}
"""A file to read, and one model, a folder or a repository, in the place of all configured ones."""


def load(
    flags: Mapping[str, str | int | Path | None], environ: Mapping[str, str] = os.environ
) -> Settings:
    """Read everything once. `flags`: names of settings, and `config`, `model` and `revision` (of
    `model`); None is not given.

    An empty variable counts as not set. Raises: SettingsError.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    named = _read_environment(environ)
    config = given.pop("config", named.pop("config", None))
    model = given.pop("model", named.pop("model", None))
    revision = given.pop("revision", None)
    if revision is not None and model is None:
        raise SettingsError("--revision: only for a model that --model or TOLLGATE_MODEL names")
    table, source = _read_file(None if config is None else Path(config))
    for name, value in named.items():
        table[name] = _convert_one(name, value, f"TOLLGATE_{name.upper()}")
    for name, value in given.items():
        table[name] = _convert_one(name, value, f"--{name.replace('_', '-')}")
    try:
        file = msgspec.convert(table, _File, dec_hook=_decode_path)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{source}: {_explain(error)}") from None
    alone = None if model is None else _alone(str(model), revision)
    return _complete(file, source, alone)


def save(settings: Settings, path: Path) -> None:
    """Write what `restore` reads, for this user only: a database URL may hold a password."""
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(msgspec.json.encode(settings, enc_hook=str))
    fresh.rename(path)


def restore(path: Path) -> Settings:
    """What `save` wrote. Raises: OSError, msgspec.DecodeError."""
    return msgspec.json.decode(path.read_bytes(), type=Settings, dec_hook=_decode_path)


def read_secret(variable: str) -> str:
    """The value of the environment variable an operator named. Raises: SettingsError if unset."""
    value = os.environ.get(variable, "")
    if not value:
        raise SettingsError(f"api_key_env: the environment variable {variable} is not set")
    return value


def child_environment(**extra: str) -> dict[str, str]:
    """This process's environment for a child that reads its settings elsewhere."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TOLLGATE_")}
    return {**kept, **extra}


def _decode_path(kind: type, value: Any) -> Path:
    """msgspec's hook: settings hold no other foreign type. Raises: TypeError (a wrong type)."""
    if kind is Path and isinstance(value, str) and value:
        return Path(value)
    raise TypeError("Expected a path")


def _read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    known = FROM_ENVIRONMENT | POINTERS
    found: dict[str, Any] = {}
    for variable, value in environ.items():
        if not variable.startswith("TOLLGATE_"):
            continue
        if variable not in known:
            raise SettingsError(f"{variable}: unknown; known are {', '.join(sorted(known))}")
        if value:
            found[known[variable]] = value
    return found


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
        raise SettingsError(f"{path}: not TOML: {error}") from None


def _convert_one(name: str, value: Any, source: str) -> Any:
    """A variable or a flag, which are text, as the type of the key it stands for."""
    if name not in _Scalars.__struct_fields__:
        raise SettingsError(f"{source}: unknown")
    try:
        found = msgspec.convert({name: str(value)}, _Scalars, strict=False, dec_hook=_decode_path)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{source}: {_explain(error).partition(': ')[2]}") from None
    return msgspec.to_builtins(getattr(found, name), enc_hook=str)


def _explain(error: msgspec.ValidationError, inside: str = "") -> str:
    """msgspec's message with the key first: `model[0].nme: unknown key`."""
    message, _, where = str(error).partition(" - at `")
    path = f"{inside}{where.removesuffix('`').removeprefix('$')}".removeprefix(".")
    if unknown := re.fullmatch(r"Object contains unknown field `(.+)`", message):
        return ".".join(part for part in (path, unknown[1]) if part) + ": unknown key"
    if missing := re.fullmatch(r"Object missing required field `(.+)`", message):
        return ".".join(part for part in (path, missing[1]) if part) + ": missing"
    kind, _, pattern = message.partition(" matching regex ")
    if pattern in IN_WORDS:
        kind = f"Expected {IN_WORDS[pattern]}"
    return f"{path or 'table'}: {kind[0].lower()}{kind[1:]}"


def _alone(model: str, revision: Any = None) -> _Model:
    """The only model that is served, named after its repository or its folder."""
    path = Path(model).absolute() if model.startswith(".") else Path(model)
    repository = _repository(path)
    name = repository or path.absolute().name or "model"
    return _Model(name=name, path=path, revision=None if revision is None else str(revision))


def _complete(file: _File, source: str, alone: _Model | None) -> Settings:
    home = file.home.absolute()
    written = file.model
    if alone is not None or not written:
        written = [alone or _alone(str(DEFAULT_MODEL))]
    try:
        models = tuple(_to_model(each, at, Home(home)) for at, each in enumerate(written))
        _refuse_duplicates([each.name for each in models])
        plans = {name: _to_plan(name, table) for name, table in file.plan.items()}
        plans.setdefault(DEFAULT_PLAN.name, DEFAULT_PLAN)
        database_url = None if file.database_url is None else _database_url(file.database_url)
        if file.redis_url is not None:
            _check_redis_url(file.redis_url)
    except SettingsError as error:
        raise SettingsError(f"{source}: {error}") from None
    shipped = sorted((PACKAGE_ROOT / "billing" / "price_books").glob("*.toml"))
    return Settings(
        home=home,
        host=file.host,
        port=file.port,
        workers=file.workers,
        database_url=database_url,
        redis_url=file.redis_url,
        secret_key_file=(file.secret_key_file or Home(home).secret).absolute(),
        models=models,
        plans=tuple(plans.values()),
        engine=file.engine,
        price_books=(*shipped, *(path.absolute() for path in file.price_books)),
        max_body_bytes=file.max_body_bytes,
        drain_timeout_s=file.drain_timeout_s,
        stalled_reader_s=file.stalled_reader_s,
        log_level=file.log_level,
    )


def _to_model(model: _Model, position: int, home: Home) -> ModelConfig:
    at = f"model[{position}]"
    if sum((model.path is not None, model.upstream is not None, bool(model.replica))) != 1:
        raise SettingsError(f"{at} ({model.name}): wants exactly one of path, upstream, replica")
    if model.path is not None:
        for key in ("upstream_model", "api_key_env", "tokenizer", "context_window"):
            if getattr(model, key) is not None:
                raise SettingsError(f"{at}.{key}: only for an upstream; this model has a path")
        repository = _repository(model.path)
        if model.revision is not None and repository is None:
            raise SettingsError(f"{at}.revision: only for a repository; {model.path} is none")
        return ModelConfig(
            name=model.name,
            path=None if repository is not None else _find(model.path),
            repository=repository,
            revision=model.revision,
            engine=model.engine or f"unix:{home.engine_socket(position)}",
            starts_engine=model.engine is None,
        )
    if model.engine is not None or model.revision is not None:
        key = "revision" if model.engine is None else "engine"
        raise SettingsError(f"{at}.{key}: only for a model with a path")
    if model.replica and (model.upstream_model or model.api_key_env):
        raise SettingsError(f"{at}: upstream_model and api_key_env belong into each replica")
    replicas = model.replica or [
        _Replica(
            upstream=model.upstream or "",
            upstream_model=model.upstream_model,
            api_key_env=model.api_key_env,
        )
    ]
    return ModelConfig(
        name=model.name,
        replicas=tuple(
            ReplicaConfig(
                upstream=each.upstream.rstrip("/"),
                upstream_model=each.upstream_model or model.name,
                api_key_env=each.api_key_env,
                weight=each.weight,
            )
            for each in replicas
        ),
        context_window=model.context_window,
        tokenizer=None if model.tokenizer is None else model.tokenizer.absolute(),
    )


def _to_plan(name: str, table: Any) -> Plan:
    try:
        limits = msgspec.convert(table, _Plan)
    except msgspec.ValidationError as error:
        raise SettingsError(_explain(error, f"plan.{name}")) from None
    return Plan(name=name, **msgspec.structs.asdict(limits))


def _repository(path: Path) -> str | None:
    """`path` if it names a repository on a hub, and no folder here or of Tollgate's."""
    return str(path) if names_a_repository(path) and not _find(path).exists() else None


def _find(path: Path) -> Path:
    """A model of the working folder, or else one that comes with Tollgate."""
    shipped = PACKAGE_ROOT / path
    return shipped if not path.exists() and shipped.exists() else path.absolute()


def _refuse_duplicates(names: list[str]) -> None:
    for position, name in enumerate(names):
        if name in names[:position]:
            raise SettingsError(f"model[{position}].name: there are two models named {name!r}")


def _database_url(url: str) -> str:
    from gateway.db import normalise  # SQLAlchemy: not for a start that needs no URL

    try:
        return normalise(url)
    except ValueError as error:
        raise SettingsError(f"database_url: {error}") from None


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
