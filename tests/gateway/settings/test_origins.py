"""Each setting has a source; secrets are never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.settings.load import load_report
from gateway.settings.origins import SettingOrigin, lines_of, origins_of, without_secrets

CONFIG = """\
port = 9000  # a comment
database_url = "postgresql://u:hunter2@db/x"
trusted_proxies = [
    "10.0.0.0/8",
]

[deadlines]
interactive = 5.0

[mcp.loop]
max_rounds = 3

[[model]]
name = "far"
upstream = "https://u:hunter2@api.example.com/v1?key=hunter2"

[[model]]
name = "two"
[[model.replica]]
upstream = "http://127.0.0.1:1/v1"
[[model.replica]]
upstream = "http://127.0.0.1:2/v1"
weight = 3

[[mcp.servers]]
name = "files"
command = "/bin/true"
args = ["--token", "hunter2"]
environment = { TOKEN = "hunter2" }

[plan."my team"]
requests_per_minute = 60
"""


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, SettingOrigin]:
    monkeypatch.chdir(tmp_path)
    Path("tollgate.toml").write_text(CONFIG)
    report = load_report({"workers": 2}, {"TOLLGATE_HOST": "127.0.0.2"})
    return {each.key: each for each in origins_of(report)}


@pytest.mark.parametrize(
    ("key", "value", "source"),
    [
        ("port", 9000, "tollgate.toml:1"),
        ("trusted_proxies", ("10.0.0.0/8",), "tollgate.toml:3"),
        ("mcp.loop.max_rounds", 3, "tollgate.toml:11"),
        ("mcp.loop.max_seconds", 600.0, "default"),
        ("model[0].name", "far", "tollgate.toml:14"),
        ("model[0].tokenizer", None, "default"),
        ("model[1].replica[1].weight", 3, "tollgate.toml:23"),
        ("model[1].replica[0].weight", 1, "default"),
        ("plan.my team.requests_per_minute", 60, "tollgate.toml:32"),
        ("workers", 2, "--workers"),
        ("host", "127.0.0.2", "TOLLGATE_HOST"),
        ("log_level", "info", "default"),
    ],
)
def test_each_setting_has_its_source(
    found: dict[str, SettingOrigin], key: str, value: object, source: str
) -> None:
    assert (found[key].value, found[key].source) == (value, source)


def test_folders_are_whole(found: dict[str, SettingOrigin], tmp_path: Path) -> None:
    assert found["home"].value == str(tmp_path / ".tollgate")


def test_no_secret_is_shown(found: dict[str, SettingOrigin]) -> None:
    assert "hunter2" not in repr(found)
    assert found["mcp.servers[0].args"].value == "(2 arguments)"
    assert found["mcp.servers[0].environment.TOKEN"].value == "(set)"
    assert found["mcp.servers[0].environment.TOKEN"].source == "tollgate.toml:29"
    assert found["model[0].upstream"].value == "https://u:***@api.example.com/v1?..."
    assert found["database_url"].source == "tollgate.toml:2"


def test_a_model_of_a_flag_is_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = {each.key: each for each in origins_of(load_report({"model": "acme/m"}, {}))}
    assert (found["model[0].path"].value, found["model[0].path"].source) == ("acme/m", "--model")
    found = {each.key: each for each in origins_of(load_report({}, {}))}
    assert found["model[0].name"] == SettingOrigin("model[0].name", "penny", "default")


def test_text_in_a_string_of_several_lines_is_no_key() -> None:
    assert lines_of('a = """\nb = 1\n"""\nc = 2\nd = """x"""\ne = 3') == {
        "a": 1,
        "c": 4,
        "d": 5,
        "e": 6,
    }


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:pw@h:1/0", "redis://:***@h:1/0"),
        ("unix:///a/b", "unix:///a/b"),
        ("http://[::1]:80/x?y=z#f", "http://[::1]:80/x?..."),
        ("http://[x", "(a URL)"),
    ],
)
def test_urls_lose_passwords_and_queries(url: str, shown: str) -> None:
    assert without_secrets(url) == shown
