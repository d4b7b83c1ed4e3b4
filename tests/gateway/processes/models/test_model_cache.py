"""Models of the settings that come from a source: brought once, what they were at first, checked
where a version is named, and kept while they are served."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.model_files import version_of
from gateway.home import Home
from gateway.installation.model_versions import version_of as settings_version_of
from gateway.installation.model_versions import weights_of
from gateway.processes.models.model_cache import ModelHolds, open_cache, with_cached_models
from gateway.processes.start_view import StartView
from gateway.settings.changes import changes_between
from gateway.settings.file import SettingsError
from gateway.settings.load import Settings, load
from tests.engine.model_cache.remote import FILES
from tests.engine.text.hub_server import ROOT, Hub

ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"lora"}
SOURCE = "hf:acme/penny@v1"
NONE = "sha256:" + "0" * 64


def version(files: dict[str, bytes]) -> str:
    return version_of({name: hashlib.sha256(each).hexdigest() for name, each in files.items()})


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as started:
        started.push("acme/penny", FILES, branch="v1")
        yield started


def written(hub: Hub, model: str) -> Settings:
    Path("tollgate.toml").write_text(
        f"[model_cache]\nhub_endpoint = '{hub.url}'\n[[model]]\nname = 'penny'\n{model}\n"
    )
    return load({"home": "home"}, {})


def brought(
    settings: Settings, holds: ModelHolds | None = None, *, weights: bool = True
) -> tuple[Settings, list[str]]:
    said: list[str] = []
    holds = holds or ModelHolds()
    found = with_cached_models(settings, weights=weights, view=StartView(said.append), holds=holds)
    return found, said


def test_a_source_stays_what_it_was_at_first(hub: Hub) -> None:
    settings = written(hub, f"path = '{SOURCE}'")
    assert settings.models[0].path is None and settings.models[0].source == SOURCE
    first, said = brought(settings)
    (model,) = first.models
    assert (model.version, model.path) == (
        version(FILES),
        Home(settings.home).model_cache / "models" / version(FILES).removeprefix("sha256:"),
    )
    pins = Home(settings.home).pinned_weights
    assert said[-1] == f"{SOURCE} is served at {version(FILES)}, until {pins} is deleted."
    assert weights_of(model) == f"{SOURCE} {version(FILES)[:19]}"
    hub.push("acme/penny", {**FILES, "config.json": b"[]"}, branch="v1")
    hub.requests.clear()
    assert brought(settings) == (first, []) and hub.requests == []
    pins.unlink()
    moved, _ = brought(settings)
    assert moved.models[0].version == version({**FILES, "config.json": b"[]"})
    assert settings_version_of(moved.models[0]) != settings_version_of(model)
    assert [str(each) for each in changes_between(first, moved)] == [
        f'~ models.penny.version: "{model.version}" -> "{moved.models[0].version}"'
    ]
    assert brought(written(hub, f"path = '{SOURCE}'\nversion = '{model.version}'"))[0] == first


def test_a_pinned_source_is_fetched_at_its_commit_again(hub: Hub) -> None:
    settings = written(hub, f"path = '{SOURCE}'")
    holds = ModelHolds()
    first, _ = brought(settings, holds)
    hub.push("acme/penny", {**FILES, "config.json": b"[]"}, branch="v1")
    holds.keep(settings)
    assert first.models[0].version is not None
    open_cache(settings).remove(first.models[0].version)
    assert brought(settings)[0] == first


def test_another_version_is_refused_in_one_line(hub: Hub) -> None:
    with pytest.raises(SettingsError) as refused:
        brought(written(hub, f"path = '{SOURCE}'\nversion = '{NONE}'"))
    assert str(refused.value) == (
        f"model penny: {SOURCE} is version {version(FILES)}, not {NONE}, which it has to be"
    )


def test_a_folder_may_have_to_be_a_version(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in {**FILES, "README.md": b"not the model"}.items():
        (folder / name).write_bytes(content)
    settings = written(hub, f"path = 'model'\nversion = '{version(FILES)}'")
    assert brought(settings)[0] == settings
    assert Home(settings.home).file_hashes.exists(), "hashed once"
    (folder / "config.json").write_bytes(b"[]")
    with pytest.raises(SettingsError, match=f"model penny: {folder} is version sha256:.*, not"):
        brought(settings)
    (folder / "config.json").unlink()
    with pytest.raises(SettingsError, match="has no config.json"):
        brought(settings)


def test_an_adapter_comes_from_a_source_too(hub: Hub) -> None:
    hub.push("acme/legal", ADAPTER)
    model = f"path = '{SOURCE}'\n[[model.adapter]]\nname = 'legal'\npath = 'hf:acme/legal'\n"
    found, _ = brought(written(hub, model))
    (adapter,) = found.models[0].adapters
    assert adapter.version == version(ADAPTER) and adapter.path is not None
    assert {each.name: each.read_bytes() for each in adapter.path.iterdir()} == ADAPTER
    with pytest.raises(
        SettingsError, match="adapter legal: hf:acme/legal is version sha256:.* not"
    ):
        brought(written(hub, f"{model}version = '{NONE}'"))


def test_a_worker_alone_has_the_texts(hub: Hub) -> None:
    found, _ = brought(written(hub, f"path = '{SOURCE}'\nversion = '{NONE}'"), weights=False)
    (model,) = found.models
    assert model.path is not None and model.version == NONE
    assert not list(model.path.glob("*.safetensors"))


def test_what_is_served_no_more_may_go(hub: Hub) -> None:
    holds = ModelHolds()
    first, _ = brought(written(hub, f"path = '{SOURCE}'"), holds)
    assert first.models[0].version is not None
    cache = open_cache(first)
    assert [each.in_use for each in cache.entries()] == [True]
    brought(first, holds)
    holds.keep(first)
    assert [each.in_use for each in cache.entries()] == [True]
    holds.keep(written(hub, "path = 'elsewhere'"))
    assert [each.in_use for each in cache.entries()] == [False]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("path = 'hf:penny'", r"model\[0\].path: 'hf:penny': expected hf:ORG/NAME"),
        ("path = 's3://Bucket/x'", r"model\[0\].path: 's3:/Bucket/x': expected"),
        (f"path = '{SOURCE}'\nversion = 'v1'", r"model\[0\].version: expected 'sha256:' and 64"),
        (f"path = '{SOURCE}'\nrevision = 'v1'", "revision: only for a repository"),
        (f"upstream = 'http://x/v1'\nversion = '{NONE}'", "version: only for a model with a path"),
        (
            f"path = '{SOURCE}'\n[[model.adapter]]\nname = 'a'\npath = 's3:'",
            r"model\[0\].adapter\[0\].path: 's3:': expected",
        ),
    ],
)
def test_what_makes_no_sense_names_its_field(hub: Hub, model: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        written(hub, model)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("max_bytes = 1", "model_cache.max_bytes: expected `int` >= 1048576"),
        ("hub_endpoint = 'hub'", "model_cache.hub_endpoint: expected a URL"),
        ("s3 = {bucket = 'b'}", "model_cache.s3.bucket: unknown key"),
        ("s3 = {timeout_s = 0}", "model_cache.s3.timeout_s: expected `float` >= 0.1"),
    ],
)
def test_a_mistake_in_its_table_is_named(table: str, message: str) -> None:
    Path("tollgate.toml").write_text(f"[model_cache]\n{table}\n")
    with pytest.raises(SettingsError, match=message):
        load({}, {})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            "hub_token_env = 'NOWHERE'",
            "model_cache.hub_token_env: the environment variable NOWHERE",
        ),
        ("s3 = {access_key_env = 'A'}", "model_cache.s3: access_key_env and secret_key_env go"),
        (
            "s3 = {access_key_env = 'NOWHERE', secret_key_env = 'B'}",
            "model_cache.s3.access_key_env: the environment variable NOWHERE is not set",
        ),
    ],
)
def test_a_secret_that_is_not_set_is_named(table: str, message: str) -> None:
    Path("tollgate.toml").write_text(
        f"[model_cache]\n{table}\n[[model]]\nname = 'penny'\npath = '{SOURCE}'\n"
    )
    with pytest.raises(SettingsError, match=message):
        brought(load({"home": "home"}, {}))


def test_secrets_are_read_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOKEN", "KEY", "SECRET"):
        monkeypatch.setenv(name, f"the-{name}")
    Path("tollgate.toml").write_text(
        "[model_cache]\nhub_token_env = 'TOKEN'\n"
        "s3 = {access_key_env = 'KEY', secret_key_env = 'SECRET'}\n"
    )
    access = open_cache(load({"home": "home"}, {}))._access
    assert (access.hub.token, access.s3.secret_key) == ("the-TOKEN", "the-SECRET")
    assert "the-" not in repr(access)


def test_an_engine_alone_refuses_another_version_in_one_line(hub: Hub, tmp_path: Path) -> None:
    arguments = ["--model", SOURCE, "--version", NONE, "--model-cache", "cache", "--explain"]
    done = subprocess.run(
        [sys.executable, "-m", "engine", *arguments],
        cwd=tmp_path,
        env=hub.environment(tmp_path / "hf") | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"engine: {SOURCE} is version sha256:") and NONE in line
