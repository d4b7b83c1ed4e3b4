"""Brings models and adapters that the settings name by a source into the model cache, and checks
those that have to be a version.

HOME/weights.json remembers the version that each source was when it was first served: a restart
serves the same weights, without a word to the source, until the operator names another version or
deletes the file.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from engine.errors import ConfigError
from engine.model_cache.cache import Access, CachedModel, ModelCache, write_whole
from engine.model_cache.hub_files import HubAccess
from engine.model_cache.listings import list_folder
from engine.model_cache.locks import FileLock
from engine.model_cache.remote_files import Part
from engine.model_cache.s3_files import S3Access
from engine.model_cache.sources import parse_source
from gateway.home import Home
from gateway.processes.start_view import StartView, download_of
from gateway.settings.file import ModelCacheConfig, SettingsError
from gateway.settings.load import Settings, read_secret
from gateway.settings.models import AdapterConfig, ModelConfig

Named = TypeVar("Named", ModelConfig, AdapterConfig)


class PinnedWeights(msgspec.Struct, frozen=True):
    """The version that a source was when it was first served."""

    version: str
    state: str
    """A repository's commit, or a digest of what a store listed."""


class ModelHolds:
    """Keeps the models in the cache that the settings name, until they name others or the process
    ends. An engine keeps its own, too."""

    def __init__(self) -> None:
        self._held: dict[Path, FileLock] = {}

    def add(self, found: CachedModel) -> None:
        if found.folder in self._held:
            found.hold.close()
        else:
            self._held[found.folder] = found.hold

    def keep(self, settings: Settings) -> None:
        """Let go of what the settings, which are in force now, do not name."""
        wanted = {model.path for model in settings.models}
        wanted |= {each.path for model in settings.models for each in model.adapters}
        for folder in self._held.keys() - wanted:
            self._held.pop(folder).close()


def open_cache(settings: Settings) -> ModelCache:
    """Raises: SettingsError, if a secret is not set."""
    config = settings.model_cache
    path = Home(settings.home).model_cache if config.path is None else config.path.absolute()
    return ModelCache(path, config.max_bytes, access_of(config))


def access_of(config: ModelCacheConfig) -> Access:
    """Raises: SettingsError."""
    token = None
    if config.hub_token_env is not None:
        token = read_secret(config.hub_token_env, "model_cache.hub_token_env")
    s3 = config.s3
    if (s3.access_key_env is None) != (s3.secret_key_env is None):
        raise SettingsError("model_cache.s3: access_key_env and secret_key_env go together")
    keys: tuple[str | None, str | None] = None, None
    if s3.access_key_env is not None and s3.secret_key_env is not None:
        keys = (
            read_secret(s3.access_key_env, "model_cache.s3.access_key_env"),
            read_secret(s3.secret_key_env, "model_cache.s3.secret_key_env"),
        )
    return Access(
        HubAccess(config.hub_endpoint, token),
        S3Access(
            endpoint=s3.endpoint,
            region=s3.region,
            access_key=keys[0],
            secret_key=keys[1],
            anonymous=s3.anonymous,
            path_style=s3.path_style,
            connect_timeout_s=s3.connect_timeout_s,
            timeout_s=s3.timeout_s,
        ),
    )


def with_cached_models(
    settings: Settings, *, weights: bool, view: StartView, holds: ModelHolds
) -> Settings:
    """Return the settings with the folders of models and adapters that come from a source, all of
    which have the versions that they have to have. `weights`: False for a process that starts no
    engine: it needs the texts alone, and no version is checked. Raises: SettingsError, OSError."""
    adapters = [each for model in settings.models for each in model.adapters]
    named: list[ModelConfig | AdapterConfig] = [*settings.models, *adapters]
    if not any(each.source or each.version for each in named):
        return settings
    bringing = ModelBringer(settings, weights=weights, view=view, holds=holds)
    models = tuple(map(bringing.complete, settings.models))
    bringing.write_pins()
    return msgspec.structs.replace(settings, models=models)


class ModelBringer:
    """Brings what the settings name, once."""

    def __init__(
        self, settings: Settings, *, weights: bool, view: StartView, holds: ModelHolds
    ) -> None:
        """Raises: SettingsError, OSError."""
        self._home = Home(settings.home)
        self._home.create()
        self._cache = open_cache(settings)
        self._weights, self._view, self._holds = weights, view, holds
        self._pins = read_pins(self._home.pinned_weights)

    def complete(self, model: ModelConfig) -> ModelConfig:
        """Raises: SettingsError."""
        is_loaded = model.engine_options.load_format != "dummy" and bool(model.started)
        part: Part = "model" if self._weights and is_loaded else "texts"
        try:
            found = self._brought(model, part)
        except ConfigError as error:
            raise SettingsError(f"model {model.name}: {error.message}") from None
        adapters = tuple(map(self._complete_adapter, model.adapters))
        return msgspec.structs.replace(found, adapters=adapters)

    def write_pins(self) -> None:
        """Raises: OSError."""
        write_whole(self._home.pinned_weights, msgspec.json.format(msgspec.json.encode(self._pins)))

    def _complete_adapter(self, adapter: AdapterConfig) -> AdapterConfig:
        try:
            return self._brought(adapter, "adapter")
        except ConfigError as error:
            raise SettingsError(f"adapter {adapter.name}: {error.message}") from None

    def _brought(self, named: Named, part: Part) -> Named:
        """Raises: ConfigError."""
        if named.source is not None:
            found = self._fetch(named, named.source, part)
            # Texts alone have a version of their own.
            version = named.version if part == "texts" else found.version
            return msgspec.structs.replace(named, path=found.folder, version=version)
        if named.version is not None and named.path is not None and part != "texts":
            check_folder(named.path, part, named.version, self._home.file_hashes)
        return named

    def _fetch(self, named: ModelConfig | AdapterConfig, written: str, part: Part) -> CachedModel:
        source, key = parse_source(written), f"{part} {written}"
        pin = self._pins.get(key)
        wanted = named.version if part != "texts" else None
        revision = None
        if pin is not None and wanted in (None, pin.version):
            wanted = pin.version
            revision = pin.state if source.kind == "hf" else None
        try:
            found = self._cache.fetch(
                source,
                partial(self._view.download, written),
                part=part,
                version=wanted,
                revision=revision,
            )
        except ConfigError as error:
            if pin is None or named.version is not None:
                raise
            what = f"it was first served at that, as {self._home.pinned_weights} says"
            raise ConfigError(f"{error.message} ({what})") from error
        self._view.end(download_of(written))
        self._holds.add(found)
        if pin is None and named.version is None:
            self._view.say(
                f"{written} is served at {found.version}, until {self._home.pinned_weights} is "
                "deleted."
            )
        self._pins[key] = PinnedWeights(found.version, found.state)
        return found


def check_folder(folder: Path, part: Part, wanted: str, hashes: Path) -> None:
    """Raises: ConfigError, if the files of a folder are another version."""
    try:
        found = list_folder(folder, part, hashes).version
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: {error.strerror}") from error
    if found != wanted:
        raise ConfigError(f"{folder} is version {found}, not {wanted}, which it has to be")


def read_pins(path: Path) -> dict[str, PinnedWeights]:
    """Raises: SettingsError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, PinnedWeights])
    except FileNotFoundError:
        return {}
    except msgspec.DecodeError as error:
        raise SettingsError(f"{path}: {error}") from None
