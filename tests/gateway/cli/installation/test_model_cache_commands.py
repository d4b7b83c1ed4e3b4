"""`tollgate models fetch` and `models cache` show and change the cache of this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.cli.main import tollgate
from gateway.processes.models.model_cache import ModelHolds, with_cached_models
from gateway.processes.start_view import StartView
from gateway.settings.load import load
from tests.engine.model_cache.remote import FILES
from tests.engine.text.hub_server import Hub

SOURCE = "hf:acme/penny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    with Hub() as started:
        Path("tollgate.toml").write_text(
            f"home = 'home'\n[model_cache]\nhub_endpoint = '{started.url}'\n"
            f"[[model]]\nname = 'penny'\npath = '{SOURCE}'\n"
        )
        started.push("acme/penny", FILES)
        yield started


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(tollgate, ["models", *arguments])
    return done.exit_code, done.stderr if done.exit_code else done.stdout


def test_a_model_is_fetched_shown_and_removed(hub: Hub) -> None:
    assert run("cache", "list") == (0, "The cache is empty.\n")
    status, said = run("fetch", SOURCE)
    version, _, folder = said.removeprefix(f"{SOURCE} is version ").partition(", in ")
    assert status == 0 and Path(folder.strip().removesuffix(".")).is_dir()
    head, row = run("cache", "list")[1].splitlines()
    assert head.split() == ["VERSION", "SOURCE", "PART", "MB", "IN", "USE", "USED"]
    assert row.split()[:5] == [version[:19], SOURCE, "model", "0.0", "no"]
    (entry,) = map(json.loads, run("cache", "list", "--json")[1].splitlines())
    assert entry["version"] == version and entry["size"] == sum(map(len, FILES.values()))
    hub.requests.clear()
    holds = ModelHolds()
    settings = load({}, {})
    served = with_cached_models(settings, weights=True, view=StartView(print), holds=holds)
    assert served.models[0].version == version
    assert not hub.downloaded(), "a start downloads nothing"
    assert run("cache", "remove", version) == (2, f"tollgate: {version} is in use\n")
    holds.keep(load({"model": "elsewhere"}, {}))
    assert run("cache", "remove", version[:12]) == (0, f"{version} is removed: 0.0 MB.\n")
    assert run("cache", "list") == (0, "The cache is empty.\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fetch", "penny"), "'penny': expected hf:ORG/NAME"),
        (("fetch", SOURCE, "--version", "v1"), "'v1': expected sha256: and 64 hex digits"),
        (("fetch", SOURCE, "--adapter"), "hf:acme/penny has no adapter_config.json"),
        (("cache", "remove", "sha256:0"), "the cache has no versions that begin with 'sha256:0'"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    hub: Hub, arguments: tuple[str, ...], message: str
) -> None:
    status, said = run(*arguments)
    assert status == 2 and said.startswith(f"tollgate: {message}") and said.count("\n") == 1
