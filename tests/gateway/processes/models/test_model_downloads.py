"""Models that the settings name `org/name`: fetched once, pinned, and served like any other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.processes.models.model_downloads import with_folders
from gateway.processes.start_view import StartView
from gateway.settings.file import SettingsError
from gateway.settings.load import load
from gateway.settings.models import PACKAGE_ROOT
from tests.engine.text.hub_server import Hub

ROOT = Path(__file__).resolve().parents[4]
PENNY = PACKAGE_ROOT / "models" / "penny"
NAME = "acme/penny"

RUN = """
import sys
from gateway.cli.main import fetch_models
from gateway.processes.models.model_cache import ModelHolds
from gateway.settings.load import load
from gateway.settings.file import SettingsError
try:
    weights = sys.argv[2] == "weights"
    settings = fetch_models(load({"home": sys.argv[1]}), weights=weights, holds=ModelHolds())
except SettingsError as error:
    sys.exit(str(error))
for model in settings.models:
    print("path", model.path)
assert "torch" not in sys.modules
"""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as started:
        yield started


def run(environment: dict[str, str], tmp_path: Path, what: str = "weights") -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path / "home"), what],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]


def test_a_name_is_a_repository_where_no_folder_is() -> None:
    Path("here/model").mkdir(parents=True)
    (found,) = load({"model": "here/model"}, {}).models
    assert found.path == Path("here/model").absolute() and found.repository is None
    (found,) = load({"model": "models/penny"}, {}).models
    assert found.path == PENNY, "what comes with Tollgate is a folder"
    (found,) = load({}, {"TOLLGATE_MODEL": NAME}).models
    assert (found.name, found.repository, found.path) == (NAME, NAME, None)
    assert found.starts_engine
    (found,) = load({"model": NAME, "revision": "v1"}, {}).models
    assert found.revision == "v1"
    Path("tollgate.toml").write_text(f'[[model]]\nname = "p"\npath = "{NAME}"\nrevision = "v2"\n')
    (found,) = load({}, {}).models
    assert (found.name, found.repository, found.revision) == ("p", NAME, "v2")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ('path = "models/penny"\nrevision = "v1"', "revision: only for a repository"),
        ('upstream = "http://x/v1"\nrevision = "v1"', "revision: only for a model with a path"),
    ],
)
def test_a_revision_wants_a_repository(model: str, message: str) -> None:
    Path("tollgate.toml").write_text(f'[[model]]\nname = "p"\n{model}\n')
    with pytest.raises(SettingsError, match=message):
        load({}, {})
    with pytest.raises(SettingsError, match="--revision: only for a model that --model"):
        load({"revision": "v1"}, {})


def test_folders_are_left_as_they_are(tmp_path: Path) -> None:
    settings = load({"home": tmp_path / "home"}, {})

    def say(line: str) -> None:
        raise AssertionError(line)

    assert with_folders(settings, weights=True, view=StartView(say)) == settings
    assert not (tmp_path / "home").exists()


def test_a_restart_serves_the_same_commit(hub: Hub, tmp_path: Path) -> None:
    first = hub.push(NAME, {"config.json": b"{}", "tokenizer.json": b"{ }",
                            "model.safetensors": b"1"})  # fmt: skip
    environment = hub.environment(tmp_path / "cache", TOLLGATE_MODEL=NAME)
    begun, ready, said, path = run(environment, tmp_path)[:4]
    assert begun == f"Starting: download of {NAME}, 0 MB"
    assert ready.startswith(f"Ready: download of {NAME}, after ")
    assert said.startswith(f"{NAME} is served at commit {first}")
    assert path.endswith(first)
    hub.push(NAME, {"config.json": b"[]", "tokenizer.json": b"{ }", "model.safetensors": b"2"})
    hub.requests.clear()
    assert run(environment, tmp_path) == [path], "nothing new, and nothing said"
    assert hub.requests == []
    (tmp_path / "home" / "commits.json").unlink()
    moved = run(environment, tmp_path)
    assert not moved[3].endswith(first)


def test_a_worker_alone_fetches_the_texts(hub: Hub, tmp_path: Path) -> None:
    hub.push_folder(NAME, PENNY)
    path = run(hub.environment(tmp_path / "cache", TOLLGATE_MODEL=NAME), tmp_path, "texts")[1]
    folder = Path(path.removeprefix("path "))
    assert (folder / "tokenizer.json").read_bytes() == (PENNY / "tokenizer.json").read_bytes()
    assert not list(folder.glob("*.safetensors"))


def test_what_cannot_be_fetched_is_one_line(hub: Hub, tmp_path: Path) -> None:
    (line,) = run(hub.environment(tmp_path / "cache", TOLLGATE_MODEL="acme/nobody"), tmp_path)
    assert line.startswith("model acme/nobody: acme/nobody is no folder here and no model on http")
