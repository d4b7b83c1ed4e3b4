"""Says which engines are to run on Ray, with what, and which gateway they join. Imports no Ray."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from engine.protocol import EngineRole
from gateway.settings.file import SettingsError
from gateway.settings.load import Settings
from gateway.settings.models import PACKAGE_ROOT, ModelConfig

ANY_PORT = "--peer-listen", "tcp:0.0.0.0:0"
"""Lets engines of other nodes read what one of a role has computed."""


class LaunchedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The engines of one model, of one role. `arguments`: of each, but for what its join needs."""

    name: str
    role: EngineRole
    engines: int
    arguments: tuple[str, ...]
    resources: dict[str, float]
    """Ray sets so much aside for each engine, by its own names."""

    @property
    def pool(self) -> str:
        """Return what tells it from all others."""
        return self.name if self.role == "both" else f"{self.name}, {self.role}"

    @classmethod
    def all_of(cls, model: ModelConfig, settings: Settings) -> Iterator[LaunchedModel]:
        """Yield those of a model: one, or with roles one for each that may join."""
        for role, number in Counter(map(model.role_of, model.joined)).items():
            engines = number if model.ray.engines is None else model.ray.engines
            yield cls.of(model, settings, role, engines)

    @classmethod
    def of(
        cls, model: ModelConfig, settings: Settings, role: EngineRole, engines: int
    ) -> LaunchedModel:
        asked, options = model.ray, model.engine_options
        if options.num_threads is None:  # it would take all processors of its node
            options = msgspec.structs.replace(options, num_threads=max(1, int(asked.cpus)))
        return cls(
            name=model.name,
            role=role,
            engines=engines,
            arguments=(
                *("--model", _model_there(model), "--served-name", model.name),
                *_state_there(model),
                *(() if role == "both" else ("--role", role, *ANY_PORT)),
                *("--log-level", settings.log_level, "--log-format", settings.logs.format),
                *options.to_flags(),
                *(f"--adapter={adapter.name}={adapter.path}" for adapter in model.adapters),
            ),
            resources={"CPU": asked.cpus, "GPU": asked.gpus, **asked.resources},
        )


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan names all that the launcher is to keep running."""

    cluster: str
    """`auto` or HOST:PORT, as Ray takes it."""
    join_host: str | None
    """The host at which engines find the gateway. None: its own address among Ray's nodes."""
    join_port: int
    models: tuple[LaunchedModel, ...]


def plan_of(settings: Settings, join_port: int) -> LaunchPlan | None:
    """Return what the settings want of Ray; None: nothing. `join_port`: where engines come."""
    models = tuple(
        pool
        for model in settings.models
        if _wants_ray(model)
        for pool in LaunchedModel.all_of(model, settings)
    )
    if settings.ray is None or not models or settings.fleet.join_listen is None:
        return None
    host = settings.fleet.join_listen.removeprefix("tcp:").rpartition(":")[0]
    return LaunchPlan(
        cluster=settings.ray,
        join_host=None if host.strip("[]") in ("0.0.0.0", "::") else host,
        join_port=join_port,
        models=models,
    )


def check_ray(settings: Settings) -> None:
    """Refuse settings that want Ray where it is not installed, or has nothing to start. Raises:
    SettingsError."""
    if settings.ray is None:
        return
    if not any(map(_wants_ray, settings.models)):
        raise SettingsError("ray: no model lets engines join (`joined`), so Ray has none to start")
    if importlib.util.find_spec("ray") is None:
        raise SettingsError('ray: Ray is not installed here: pip install "tollgate[ray]"')


def _wants_ray(model: ModelConfig) -> bool:
    return bool(model.joined) and model.kubernetes is None and model.ray.engines != 0


def read_plan(path: Path) -> LaunchPlan:
    """Read what `write_plan` wrote. Raises: OSError, msgspec.DecodeError."""
    return msgspec.json.decode(path.read_bytes(), type=LaunchPlan)


def write_plan(path: Path, plan: LaunchPlan) -> None:
    """Raises: OSError."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(plan))
    fresh.rename(path)


def _model_there(model: ModelConfig) -> str:
    """Return where a node finds the model: what comes with Tollgate lies elsewhere on each, and of
    a hub or a store each fetches its own."""
    if model.ray.path is not None:
        return model.ray.path
    if (fetched := model.repository or model.source) is not None:
        return fetched
    assert model.path is not None
    if model.path.is_relative_to(PACKAGE_ROOT):
        return str(model.path.relative_to(PACKAGE_ROOT))
    return str(model.path)


def _state_there(model: ModelConfig) -> tuple[str, ...]:
    """Return what a node is told of the state of a model that it fetches."""
    if model.ray.path is not None:
        return ()
    if model.repository is not None and model.revision is not None:
        return "--revision", model.revision
    if model.source is not None and model.version is not None:
        return "--version", model.version
    return ()
