"""Checks once, before anything is started, that what the settings name of models is there: folders,
and the keys of upstreams. A start that would fail minutes later fails at once, with one line."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from engine.errors import ConfigError
from engine.text.chat_template import ChatTemplate
from engine.text.model_folder import (
    check_model_folder,
    check_safetensors,
    check_tokenizer,
    read_json,
)
from gateway.fleet.engine.folder_options import read_folder_options
from gateway.settings.file import SettingsError
from gateway.settings.load import Settings, read_api_key, read_secret
from gateway.settings.models import AdapterConfig, ModelConfig

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def check_models(settings: Settings, *, weights: bool) -> None:
    """Raises: SettingsError if a model's or an adapter's folder is not one that can be served, as
    far as a look tells, or if a key of an upstream or of the file store is missing. weights: the
    engines that load them are started here."""
    for model in settings.models:
        if weights and model.started:
            _check_extra("engine", "torch", f"model {model.name}: its engine")
        _check_files(model, weights=weights)
        for adapter in model.adapters:
            _check_adapter(adapter, weights=weights)
        for position, replica in enumerate(model.replicas):
            where = f"model {model.name}: " + (f"replica[{position}]." if position else "")
            try:
                read_api_key(replica, settings.secret_key_file)
            except SettingsError as error:
                raise type(error)(f"{where}{error}") from None
    if (traces := settings.traces) is not None:
        extra = "otel" if traces.protocol == "http" else "otel-grpc"
        _check_extra(extra, f"opentelemetry.exporter.otlp.proto.{traces.protocol}", "traces")
        if traces.headers_env is not None:
            read_secret(traces.headers_env, "traces.headers_env")
    if (mail := settings.mail) is not None and mail.password_env is not None:
        read_secret(mail.password_env, "mail.password_env")
    if (store := settings.file_store) is not None:
        _check_extra("s3", "obstore", "file_store")
        read_secret(store.access_key_env, "file_store.access_key_env")
        read_secret(store.secret_key_env, "file_store.secret_key_env")


def is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def _check_extra(extra: str, module: str, user: str) -> None:
    """Refuse what needs an extra of the wheel that is not installed."""
    if not is_there(module):
        # Which build of torch fits is for uv to see: an index's own for Linux is 2.6 GB.
        backend = " --torch-backend auto" if module == "torch" else ""
        install = f'uv pip install --python {sys.executable}{backend} "tollgate[{extra}]"'
        raise SettingsError(f"{user} needs {module}, which is not installed: {install}")


def _check_files(model: ModelConfig, *, weights: bool) -> None:
    is_loaded = bool(model.started) and model.engine_options.load_format != "dummy"
    try:
        if model.path is not None:
            check_model_folder(model.path, weights=weights and is_loaded)
            check_tokenizer(model.path)
            ChatTemplate.find(model.path, file=model.chat_template)
            read_folder_options(model.path)
        if (path := model.tokenizer) is not None:
            check_tokenizer(path if path.is_dir() else path.parent)
    except ConfigError as error:
        raise SettingsError(f"model {model.name}: {error.message}") from None


def _check_adapter(adapter: AdapterConfig, *, weights: bool) -> None:
    if adapter.path is None:
        return
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (adapter.path / name).is_file():
            raise SettingsError(f"adapter {adapter.name}: {adapter.path} has no {name}")
    try:
        read_json(adapter.path / ADAPTER_CONFIG)
        if weights:
            check_safetensors(adapter.path / ADAPTER_WEIGHTS)
    except ConfigError as error:
        raise SettingsError(f"adapter {adapter.name}: {error.message}") from None
