"""The models of the settings, complete: which folder, which engine with what options and adapters,
which upstreams.

Looks whether a folder is there, and reads none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import msgspec

from billing.cache_contracts import DEFAULT_CONTRACT, ContractName
from engine.errors import ConfigError
from engine.model_cache.sources import is_source, parse_source
from engine.options import EngineOptions, PositiveInt
from engine.protocol import EngineRole
from engine.text.hub import names_a_repository
from engine.text.output_parser.registry import FamilyName, ReasoningName
from gateway.generate_request import MaxTokensField
from gateway.home import Home, engine_number
from gateway.lanes import ModelSlos
from gateway.net.listener import is_loopback
from gateway.settings.cells import CellName, PeerCellConfig
from gateway.settings.engine_counts import JoinedRoles
from gateway.settings.file import (
    AdapterName,
    Concurrency,
    DialectName,
    EngineAddress,
    EngineTable,
    Name,
    RayConfig,
    SettingsError,
    Strict,
    UnknownFields,
    Url,
    Weight,
    WeightsVersion,
    WrittenModel,
    WrittenReplica,
    decode_path,
    explain,
)
from gateway.settings.kubernetes import KubernetesConfig
from gateway.settings.model_engines import (
    ReplicaRange,
    check_roles,
    joined_engines,
    started_engines,
)
from gateway.settings.sealed_keys import SealedKey

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
"""The folder that holds `models/penny` and the shipped price books."""

KV_CACHE_SIZES = {"kv_cache_bytes", "kv_cache_fraction", "num_blocks"}
"""Three ways to say one thing: a table that says one of them has said it."""

FIRST_JOINED = 1000
"""The number of the first engine that may join: behind all that are started here, however many come
with a reload."""
FIRST_BORROWED = 2000
"""The same of those that other cells may lend."""
UPSTREAMS_OWN = (
    *("upstream_model", "api_key_env", "api_key_file", "max_concurrency", "max_tokens_field"),
    *("takes_reasoning_effort", "tokenizer", "context_window", "max_output_tokens"),
    "max_image_tokens",
)
"""Options that only apply to upstreams."""
ENGINES_OWN = (
    *("engine", "insecure", "replicas", "joined", "prefill", "decode", "ray", "kubernetes"),
    *("revision", "version", "engine_options", "adapter"),
    *("cache_contract", "chat_template", "tool_call_parser", "reasoning_parser", "dialect"),
)
"""Options that only apply to models with a path."""


class ReplicaConfig(Strict, frozen=True, kw_only=True):
    """One OpenAI-compatible upstream of a model."""

    upstream: Url
    """Its base URL, `/v1` included."""
    upstream_model: str
    """The model's name at the upstream."""
    api_key_env: str | None = None
    """Name of the environment variable that holds its key; None: no variable does."""
    api_key_file: Path | None = None
    """The file that holds its key, read again at each reload. Absolute. Neither: it wants none."""
    sealed_key: SealedKey | None = None
    """Its key as an operator gave it by API; nobody writes this into a file."""
    weight: Weight = 1
    max_concurrency: Concurrency | None = None
    """Requests at once, of all gateway processes together: each has its part, rounded down."""
    max_tokens_field: MaxTokensField = "max_tokens"
    """The field that carries the output bound to the upstream if the client sets none."""
    takes_reasoning_effort: bool = False
    """It is told how much to think also where a client only hints at that."""

    @property
    def account(self) -> tuple[str, str, str | None]:
        """The account that `max_concurrency` bounds: not its position, which a new configuration
        moves."""
        key = None if self.api_key_file is None else str(self.api_key_file)
        key = key if self.sealed_key is None else self.sealed_key.data
        return self.upstream, self.upstream_model, self.api_key_env or key


class AdapterConfig(Strict, frozen=True, kw_only=True):
    """A LoRA adapter: to customers a model as any other, served by its base's engine."""

    name: AdapterName
    """The engine's name for it, too."""
    path: Path | None = None
    """A folder as PEFT writes it. Absolute. None where somebody else runs the engine, who has given
    it the adapter under this name, and of a source from which it is not fetched yet."""
    source: str | None = None
    """The source that it is fetched from into the model cache, `hf:...` or `s3://...`."""
    version: WeightsVersion | None = None
    """The digest of its files. None: any, or it is not fetched yet."""


class BorrowedEngine(Strict, frozen=True, kw_only=True):
    """A place for an engine that another cell lends."""

    cell: CellName
    address: EngineAddress
    """The address where it is found while it is lent."""


class ModelConfig(Strict, frozen=True, kw_only=True):
    """A model as customers name it: served by engines of ours (`path` and `engines`) or by
    `replicas`."""

    name: Name
    path: Path | None = None
    """A Hugging Face folder. Absolute. None for an upstream, and for a repository or source from
    which it is not fetched yet (`gateway.processes.models.model_downloads`)."""
    source: str | None = None
    """The source that it is fetched from into the model cache, `hf:...` or `s3://...`."""
    version: WeightsVersion | None = None
    """The digest of its files. None: any, or it is not fetched yet."""
    repository: str | None = None
    """`org/name` on a hub."""
    revision: str | None = None
    """The repository's branch, tag or commit; None: its default branch."""
    engines: tuple[EngineAddress, ...] = ()
    """The address that each of its engines listens on: one at least for every model with a path or
    a repository, and several, which have the same weights and adapters, only where they are started
    here."""
    joined: tuple[EngineAddress, ...] = ()
    """Those of `engines`, the last ones, where engines of other machines are while they have
    joined."""
    borrowed: tuple[BorrowedEngine, ...] = ()
    """Beside `engines`: those that other cells may lend."""
    replica_range: ReplicaRange | None = None
    """The planner's bounds on how many engines there are, of which none joins; None: as many as
    `engines`."""
    joined_range: ReplicaRange | None = None
    """The same of a model whose engines all join, as the pods of `kubernetes`; None: it counts none
    of those."""
    kubernetes: KubernetesConfig | None = None
    is_asleep: bool = False
    """None of its engines runs, until somebody asks for it: nobody listens at the one address."""
    wakes_in_s: float | None = None
    """How long it took to start when it was last; None: nobody knows."""
    ray: RayConfig = RayConfig()
    """The share of a node that each engine gets which Ray runs, if the installation has it."""
    prefill: tuple[EngineAddress, ...] = ()
    """Those of `engines` that compute prompts for the others. None: each does both."""
    starts_engine: bool = False
    """True where `tollgate up` runs its engines; False where somebody else does."""
    engine_options: EngineOptions = EngineOptions()
    """Engines that are started here get these, but for their shares of the machine
    (`options_beside`)."""
    shares_memory: bool = False
    """Its KV caches divide the free memory with those of all models that share it, too. False:
    their size is its own."""
    adapters: tuple[AdapterConfig, ...] = ()
    """Beside the model as it is."""
    cache_contract: ContractName = DEFAULT_CONTRACT
    """How what its engine reused is counted. An upstream counts by itself."""
    chat_template: Path | None = None
    """A Jinja file in place of the folder's own template. Absolute."""
    tool_call_parser: FamilyName | None = None
    reasoning_parser: ReasoningName | None = None
    """How it writes calls and what it thinks; None: its template tells."""
    replicas: tuple[ReplicaConfig, ...] = ()
    """Tried in weighted order, the next one only before the first byte."""
    context_window: PositiveInt | None = None
    """Tokens; None: the engine says, or the upstream refuses."""
    max_output_tokens: PositiveInt | None = None
    """The upstream's own bound on one choice's output, if no bound is given."""
    max_image_tokens: PositiveInt | None = None
    """The most that it counts for an image; None: the most that any vendor states."""
    tokenizer: Path | None = None
    """tokenizer.json or its folder, to count an upstream's input exactly."""
    unknown_fields: UnknownFields | None = None
    """Fields of requests that nobody here knows. None: as the installation has it."""
    dialect: DialectName | None = None
    """The way our engine is asked and told. None: as the installation has it."""
    slo: ModelSlos = ModelSlos()
    """The objectives of its requests, of its adapters' too, in place of the installation's."""
    evaluations: tuple[str, ...] = ()
    """The suites that a version has to have passed before a rollout of it begins."""

    @property
    def started(self) -> tuple[EngineAddress, ...]:
        """Return those of `engines` that are started here, none while it is asleep."""
        if not self.starts_engine or self.is_asleep:
            return ()
        return self.engines[: len(self.engines) - len(self.joined)]

    @property
    def asked_engines(self) -> tuple[EngineAddress, ...]:
        """Return all engines that requests may go to, those that other cells lend at the end."""
        return (*self.engines, *(each.address for each in self.borrowed))

    @property
    def planned_range(self) -> ReplicaRange | None:
        """Return the planner's bounds; None: it decides nothing of this model."""
        return self.replica_range or self.joined_range

    @property
    def most_started(self) -> int:
        """Return how many engines may be started for it at a time, which divide the machine."""
        return len(self.started) if self.replica_range is None else self.replica_range.most

    @property
    def most_engines(self) -> int:
        """Return how many engines it may have at a time, with those that join."""
        return len(self.engines) if self.replica_range is None else self.replica_range.most

    def sized(self, number: int) -> ModelConfig:
        """Return the model with so many engines, within its range; the addresses of more than it
        has are for `EngineSet.place` to find."""
        assert self.replica_range is not None
        number = max(self.replica_range.least, min(self.replica_range.most, number))
        engines = (self.engines + (self.engines[-1],) * number)[: max(1, number)]
        return msgspec.structs.replace(self, engines=engines, is_asleep=number == 0)

    def role_of(self, engine: EngineAddress) -> EngineRole:
        """Return what one of its engines does of requests."""
        if not self.prefill:
            return "both"
        return "prefill" if engine in self.prefill else "decode"

    def cell_of(self, engine: str) -> str | None:
        """Return the other cell that lends an engine; None: it is of this home."""
        return next((each.cell for each in self.borrowed if each.address == engine), None)

    def replica_name(self, engine: str, model: str | None = None) -> str:
        """Return the name of the replica that an engine is of this model, or of an adapter of it
        (`model`): the model's own where nothing but one engine serves it, else with the engine's
        number, and with the cell that lends it, if one does."""
        model = model or self.name
        if (cell := self.cell_of(engine)) is not None:
            return f"{model}/{cell}:{engine_number(engine)}"
        is_alone = self.most_engines == 1 and not self.borrowed
        return model if is_alone else f"{model}/{engine_number(engine)}"


class EngineNumbers:
    """Gives the engines of all models their numbers. `free`: those that no model has the first of;
    `free_joined`: those of engines that join."""

    def __init__(self, free: Iterator[int], free_joined: Iterator[int]) -> None:
        self._free, self._free_joined = free, free_joined
        self._free_borrowed = count(FIRST_BORROWED)

    def borrow(self, number: int) -> list[int]:
        """Return those of so many engines that another cell may lend."""
        return [*islice(self._free_borrowed, number)]

    def take(self, position: int, num_started: int, num_joined: int) -> tuple[list[int], list[int]]:
        """Return those of the engines that are started for a model, and of those that may join."""
        started = [position, *islice(self._free, max(0, num_started - 1))][:num_started]
        return started, [*islice(self._free_joined, num_joined)]


def alone(model: str, revision: Any = None) -> WrittenModel:
    """The only model that is served, named after its repository or its folder."""
    path = Path(model).absolute() if model.startswith(".") else Path(model)
    named = _repository(path) or _source(path, "model")
    name = _name_of(named) if named else path.absolute().name or "model"
    return WrittenModel(name=name, path=path, revision=None if revision is None else str(revision))


def to_models(
    written: Sequence[WrittenModel],
    engine: EngineTable,
    home: Home,
    peers: Sequence[PeerCellConfig] = (),
) -> tuple[ModelConfig, ...]:
    """Return the models; `engine`: what every engine that is started here is started with, where
    its model says nothing else. `peers`: the cells that may lend engines.

    Raises: SettingsError.
    """
    to_options(engine, "engine")  # each table by itself, so that an error names the right one
    for position, each in enumerate(written):
        to_options(each.engine_options, f"model[{position}].engine_options")
    # The first engine of each model has the number of its position.
    numbers = EngineNumbers(free=count(len(written)), free_joined=count(FIRST_JOINED))
    models = tuple(_to_model(each, at, engine, numbers, home) for at, each in enumerate(written))
    models = tuple(_with_borrowed(each, peers, numbers, home) for each in models)
    _refuse_duplicates(models)
    _refuse_shared_pods(models)
    return models


def to_options(table: EngineTable, at: str = "") -> EngineOptions:
    """Convert the options of an engine, which stand at the key `at`. Raises: SettingsError."""
    try:
        return msgspec.convert(table, EngineOptions, dec_hook=decode_path)
    except msgspec.ValidationError as error:
        raise SettingsError(explain(error, at)) from None


def override(shared: EngineTable, own: EngineTable) -> EngineTable:
    """Return `shared`, and what `own` says in the place of what that says.

    A size of the KV cache takes the place of any other: the engine would heed the one that is not
    meant. Another way to guess takes that of a draft model.
    """
    replaced = set() if KV_CACHE_SIZES.isdisjoint(own) else KV_CACHE_SIZES
    if own.get("speculative", "draft") != "draft":
        replaced = replaced | {"draft_model"}
    return {name: value for name, value in shared.items() if name not in replaced} | own


def options_beside(
    model: ModelConfig, models: Iterable[ModelConfig], *, num_cores: int
) -> EngineOptions:
    """Return what each engine of a model is started with beside those of all `models`.

    Engines that start side by side see the same free memory, so each takes a part of what one alone
    would: of what all share, or of the fraction that the model names. The engines of one model also
    divide the processors that one alone would compute on; models do not divide them: one may have
    nothing to do while another computes.
    """
    options, num_engines = model.engine_options, model.most_started
    shares = num_engines
    if model.shares_memory:
        shares = sum(each.most_started for each in models if each.shares_memory)
    if options.kv_cache_bytes is None and options.num_blocks is None and shares > 1:
        part = options.kv_cache_fraction / shares
        options = msgspec.structs.replace(options, kv_cache_fraction=part)
    if options.num_threads is None and num_engines > 1:
        threads = max(1, num_cores // num_engines)
        options = msgspec.structs.replace(options, num_threads=threads)
    return options


def _to_model(
    model: WrittenModel, position: int, engine: EngineTable, free: EngineNumbers, home: Home
) -> ModelConfig:
    at = f"model[{position}]"
    if sum((model.path is not None, model.upstream is not None, bool(model.replica))) != 1:
        raise SettingsError(f"{at} ({model.name}): wants exactly one of path, upstream, replica")
    if model.path is None:
        return _to_upstream(model, at)
    for key in UPSTREAMS_OWN:
        if getattr(model, key) is not None:
            raise SettingsError(f"{at}.{key}: only for an upstream; this model has a path")
    repository, source = _repository(model.path), _source(model.path, f"{at}.path")
    if model.revision is not None and repository is None:
        raise SettingsError(f"{at}.revision: only for a repository; {model.path} is none")
    starts_engine = model.engine is None
    for key in ("engine_options", "replicas", "joined", "prefill", "decode", "ray", "kubernetes"):
        if not starts_engine and is_given(getattr(model, key)):
            raise SettingsError(f"{at}.{key}: only for an engine that is started here")
    check_roles(model, at)
    range_, num_started = started_engines(model, at)
    joined_range, num_joined = joined_engines(model, at)
    _check_address(model, at)
    numbers = free.take(position, num_started, num_joined)
    started, joined = (
        tuple(f"unix:{home.engine_socket(number)}" for number in each) for each in numbers
    )
    of_roles = model.joined if isinstance(model.joined, JoinedRoles) else JoinedRoles()
    prefill = (*started[: model.prefill or 0], *joined[: of_roles.prefill or 0])
    return ModelConfig(
        name=model.name,
        path=None if repository is not None or source is not None else _find(model.path),
        repository=repository,
        source=source,
        version=model.version,
        revision=model.revision,
        engines=(*started, *joined) if model.engine is None else (model.engine,),
        joined=joined,
        ray=_ray(model, num_joined, at),
        replica_range=range_,
        joined_range=joined_range,
        kubernetes=model.kubernetes,
        prefill=prefill,
        starts_engine=starts_engine,
        engine_options=_options(engine, model.engine_options) if starts_engine else EngineOptions(),
        shares_memory=starts_engine and KV_CACHE_SIZES.isdisjoint(model.engine_options),
        adapters=tuple(_to_adapters(model, at)),
        cache_contract=model.cache_contract or DEFAULT_CONTRACT,
        chat_template=_template(model, at),
        tool_call_parser=model.tool_call_parser,
        reasoning_parser=model.reasoning_parser,
        unknown_fields=model.unknown_fields,
        dialect=model.dialect,
        slo=model.slo,
        evaluations=tuple(model.evaluations),
    )


def _with_borrowed(
    model: ModelConfig, peers: Sequence[PeerCellConfig], numbers: EngineNumbers, home: Home
) -> ModelConfig:
    """Add the places for what other cells lend, if its engines are started here."""
    if not model.starts_engine:
        return model
    borrowed = tuple(
        BorrowedEngine(cell=peer.name, address=f"unix:{home.engine_socket(number)}")
        for peer in peers
        for number in numbers.borrow(peer.borrow)
    )
    return msgspec.structs.replace(model, borrowed=borrowed)


def _ray(model: WrittenModel, num_joined: int, at: str) -> RayConfig:
    """Raises: SettingsError."""
    if model.ray is None:
        return RayConfig()
    if not num_joined:
        raise SettingsError(f"{at}.ray: only beside `joined`: engines on Ray join")
    if model.ray.engines is not None and isinstance(model.joined, JoinedRoles):
        raise SettingsError(f"{at}.ray.engines: not beside roles: all that may join run on Ray")
    if (model.ray.engines or 0) > num_joined:
        raise SettingsError(f"{at}.ray.engines: {model.ray.engines} of {num_joined} that may join")
    if {"CPU", "GPU", "memory"} & model.ray.resources.keys():
        raise SettingsError(f"{at}.ray.resources: those of the cluster's own; see cpus and gpus")
    if model.ray.gpus > 1 and model.ray.gpus % 1:
        raise SettingsError(f"{at}.ray.gpus: {model.ray.gpus}: a part of one, or whole ones")
    if not (model.ray.cpus or model.ray.gpus or model.ray.resources):
        raise SettingsError(f"{at}.ray: wants cpus, gpus or resources, or Ray has nothing to count")
    return model.ray


def is_given(value: Any) -> bool:
    """Tell whether a key of a model was written. A table without an entry says nothing."""
    return value not in (None, [], {})


def _check_address(model: WrittenModel, at: str) -> None:
    """Refuse an engine on another machine that nobody said is reached by a private way: its socket
    has no encryption and asks nobody who they are."""
    host = None
    if model.engine is not None and model.engine.startswith("tcp:"):
        host = model.engine.removeprefix("tcp:").rpartition(":")[0].strip("[]")
    if host is None and model.insecure is not None:
        raise SettingsError(f"{at}.insecure: only beside an engine's tcp: address")
    if host is not None and not is_loopback(host) and not model.insecure:
        raise SettingsError(
            f"{at}.engine: {model.engine} is on another machine, reached without encryption or "
            "credentials; let it join (docs/how-to/many-machines.md), or say insecure = true"
        )


def check_parts(models: Sequence[ModelConfig], workers: int) -> None:
    """Check that every gateway process has at least one of what they share.

    Raises: SettingsError.
    """
    for position, model in enumerate(models):
        for each in model.replicas:
            if each.max_concurrency is not None and each.max_concurrency < workers:
                raise SettingsError(
                    f"model[{position}] ({model.name}): max_concurrency {each.max_concurrency} "
                    f"cannot be shared by {workers} workers"
                )


def _options(shared: EngineTable, own: EngineTable) -> EngineOptions:
    """Put `own` over `shared`; the draft model's folder is found as a model's is."""
    options = to_options(override(shared, own))
    if options.draft_model is None:
        return options
    return msgspec.structs.replace(options, draft_model=_find(options.draft_model))


def _to_adapters(model: WrittenModel, at: str) -> Iterator[AdapterConfig]:
    for position, adapter in enumerate(model.adapter):
        key = f"{at}.adapter[{position}].path"
        if model.engine is not None and adapter.path is not None:
            raise SettingsError(f"{key}: only for an engine that is started here")
        if model.engine is None and adapter.path is None:
            raise SettingsError(f"{key}: missing")
        source = None if adapter.path is None else _source(adapter.path, key)
        path = None if adapter.path is None or source is not None else _find(adapter.path)
        if adapter.version is not None and adapter.path is None:
            raise SettingsError(f"{key.removesuffix('path')}version: only beside a path")
        yield AdapterConfig(name=adapter.name, path=path, source=source, version=adapter.version)


def _template(model: WrittenModel, at: str) -> Path | None:
    if model.chat_template is None:
        return None
    path = model.chat_template.absolute()
    if not path.is_file():
        raise SettingsError(f"{at}.chat_template: there is no file {path}")
    return path


def _to_upstream(model: WrittenModel, at: str) -> ModelConfig:
    for key in ENGINES_OWN:
        if is_given(getattr(model, key)):
            raise SettingsError(f"{at}.{key}: only for a model with a path")
    if model.replica and (model.upstream_model or model.api_key_env):
        raise SettingsError(f"{at}: upstream_model and api_key_env belong into each replica")
    for key in ("api_key_file", "max_concurrency", "max_tokens_field", "takes_reasoning_effort"):
        if model.replica and getattr(model, key):
            raise SettingsError(f"{at}: {key} belongs into each replica")
    replicas = model.replica or [
        WrittenReplica(
            upstream=model.upstream or "",
            upstream_model=model.upstream_model,
            api_key_env=model.api_key_env,
            api_key_file=model.api_key_file,
            max_concurrency=model.max_concurrency,
            max_tokens_field=model.max_tokens_field,
            takes_reasoning_effort=model.takes_reasoning_effort,
        )
    ]
    for each in replicas:
        if each.api_key_env is not None and each.api_key_file is not None:
            raise SettingsError(f"{at}: of api_key_env and api_key_file only one can hold the key")
    return ModelConfig(
        name=model.name,
        replicas=tuple(
            ReplicaConfig(
                upstream=each.upstream.rstrip("/"),
                upstream_model=each.upstream_model or model.name,
                api_key_env=each.api_key_env,
                api_key_file=None if each.api_key_file is None else each.api_key_file.absolute(),
                weight=each.weight,
                max_concurrency=each.max_concurrency,
                max_tokens_field=each.max_tokens_field or "max_tokens",
                takes_reasoning_effort=bool(each.takes_reasoning_effort),
            )
            for each in replicas
        ),
        context_window=model.context_window,
        max_output_tokens=model.max_output_tokens,
        max_image_tokens=model.max_image_tokens,
        tokenizer=None if model.tokenizer is None else model.tokenizer.absolute(),
        unknown_fields=model.unknown_fields,
        slo=model.slo,
        evaluations=tuple(model.evaluations),
    )


def _repository(path: Path) -> str | None:
    """Return `path` if it names a repository on a hub, and no folder here or of Tollgate's."""
    return str(path) if names_a_repository(path) and not _find(path).exists() else None


def _source(path: Path, at: str) -> str | None:
    """Return `path` in its one form if it names a source of the model cache. `at`: its key. Raises:
    SettingsError."""
    if not is_source(path):
        return None
    try:
        return str(parse_source(path))
    except ConfigError as error:
        raise SettingsError(f"{at}: {error.message}") from None


def _name_of(source: str) -> str:
    """Name a model by where it comes from: as its repository, or the last part of its prefix."""
    if source.startswith("hf:"):
        return source.removeprefix("hf:").partition("@")[0]
    return source.rpartition("/")[2] if source.startswith("s3:") else source


def _find(path: Path) -> Path:
    """A model of the working folder, or else one that comes with Tollgate."""
    shipped = PACKAGE_ROOT / path
    return shipped if not path.exists() and shipped.exists() else path.absolute()


def _refuse_shared_pods(models: Sequence[ModelConfig]) -> None:
    """Refuse a StatefulSet that two models scale."""
    scaled: dict[KubernetesConfig, str] = {}
    for position, model in enumerate(models):
        if model.kubernetes is not None:
            other = scaled.setdefault(model.kubernetes, model.name)
            if other != model.name:
                at = f"model[{position}].kubernetes.stateful_set"
                raise SettingsError(f"{at}: {model.kubernetes.stateful_set!r} is that of {other}")


def _refuse_duplicates(models: Sequence[ModelConfig]) -> None:
    """Refuse a name that occurs twice: customers tell models and adapters apart by nothing but
    their names."""
    seen: set[str] = set()
    for position, model in enumerate(models):
        named = {f"model[{position}]": model.name}
        for number, adapter in enumerate(model.adapters):
            named[f"model[{position}].adapter[{number}]"] = adapter.name
        for at, name in named.items():
            if name in seen:
                raise SettingsError(f"{at}.name: there are two models named {name!r}")
            seen.add(name)
