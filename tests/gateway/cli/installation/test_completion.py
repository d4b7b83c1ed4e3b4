"""Completion of commands and names in each shell, and what `--help` loads."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from foundation.periods import read_span
from gateway.cli.completion import PERIOD_UNITS
from gateway.cli.main import tollgate
from gateway.processes.credentials_file import Credentials, write
from tests.gateway.cli.shared.fake_gateway import FakeGateway, serving

ROOT = Path(__file__).resolve().parents[4]
HEAVY = ("sqlalchemy", "httpx", "rich", "litestar", "redis", "alembic", "jinja2", "torch")
"""Modules that no help needs."""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script(shell: str) -> None:
    done = CliRunner().invoke(tollgate, ["completion", shell])
    assert done.exit_code == 0
    assert f"_TOLLGATE_COMPLETE={shell}_complete" in done.stdout.replace("env ", "")
    assert "tollgate" in done.stdout


def test_bash_completes_commands_with_the_script(tmp_path: Path) -> None:
    script = CliRunner().invoke(tollgate, ["completion", "bash"]).stdout
    bash = shutil.which("bash")
    assert bash is not None
    (tmp_path / "tollgate").write_text(f'#!/bin/sh\nexec {sys.executable} -m gateway "$@"\n')
    (tmp_path / "tollgate").chmod(0o755)
    asked = "COMP_WORDS=(tollgate inv); COMP_CWORD=1; _tollgate_completion tollgate inv tollgate"
    done = subprocess.run(
        [bash, "-c", f'{script}\n{asked}\nprintf "%s\\n" "${{COMPREPLY[@]}}"'],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["invoices"], done.stderr


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGateway]:
    """A gateway of this home, as `tollgate up` leaves its address and keys."""
    monkeypatch.chdir(tmp_path)
    with serving() as found:
        known = Credentials(base_url=f"{found.url}/v1", api_key="sk-api", admin_key="sk-admin")
        home = tmp_path / ".tollgate"
        home.mkdir()
        write(home / "credentials.json", known)
        yield found


def completed(*words: str) -> list[str]:
    """Return what is offered behind these words, the last of which has begun."""
    environ = {"_TOLLGATE_COMPLETE": "bash_complete", "COMP_WORDS": shlex.join(words)}
    environ["COMP_CWORD"] = str(len(words) - 1)
    done = CliRunner().invoke(tollgate, [], env=environ, prog_name="tollgate")
    return [line.removeprefix("plain,") for line in done.stdout.split()]


def listed(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"object": "list", "data": list(rows), "has_more": False, "last_id": None}


@pytest.mark.parametrize(
    ("words", "path", "field"),
    [
        (("usage", "--model"), "/v1/admin/models", "id"),
        (("keys", "create", "--plan"), "/v1/admin/plans", "name"),
        (("keys", "revoke"), "/v1/admin/keys", "id"),
        (("budgets", "set", "5", "--project"), "/v1/admin/projects", "name"),
        (("credits", "add"), "/v1/admin/orgs", "name"),
        (("invoices", "get"), "/v1/admin/invoices", "number"),
    ],
)
def test_names_are_those_of_the_running_gateway(
    gateway: FakeGateway, words: tuple[str, ...], path: str, field: str
) -> None:
    gateway.on("GET", path, listed({field: "abc"}, {field: "abd"}, {field: "b"}, {field: None}))
    assert completed("tollgate", *words, "ab") == ["abc", "abd"]
    assert [(method, asked) for method, asked, _, _ in gateway.asked] == [("GET", path)]


def test_what_no_gateway_knows_is_not_asked_for(gateway: FakeGateway) -> None:
    assert completed("tollgate", "up", "--model", "") == []
    assert completed("tollgate", "users", "create", "--email", "") == []
    assert gateway.asked == []


def test_without_an_answer_nothing_is_offered_and_nothing_said(
    gateway: FakeGateway, tmp_path: Path
) -> None:
    assert completed("tollgate", "usage", "--model", "") == [], "404"
    gateway.on("GET", "/v1/admin/models", b"no json")
    assert completed("tollgate", "usage", "--model", "") == []
    gateway.on("GET", "/v1/admin/models", {"data": "none"})
    assert completed("tollgate", "usage", "--model", "") == []
    assert completed("tollgate", "usage", "--url", "ftp://x", "--model", "") == []
    (tmp_path / "tollgate.toml").write_text("unknown = 1")
    assert completed("tollgate", "usage", "--model", "") == []
    assert completed("tollgate", "mcp", "diff", "") == []


def test_servers_and_periods_need_no_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    server = 'command = "/bin/true"\n'
    (tmp_path / "tollgate.toml").write_text(
        f'[[mcp.servers]]\nname = "files"\n{server}[[mcp.servers]]\nname = "web"\n{server}'
    )
    assert completed("tollgate", "mcp", "diff", "f") == ["files"]
    assert completed("tollgate", "usage", "y") == ["yesterday"]
    assert completed("tollgate", "costs", "last", "m") == ["month"]
    for first, seconds in PERIOD_UNITS.items():
        for second in seconds:
            read_span(f"{first} {second}", datetime.now(UTC))


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom gateway.cli.main import tollgate\n"
        "assert CliRunner().invoke(tollgate, ['usage', '--help']).exit_code == 0\n"
        f"print([each for each in {HEAVY!r} if each in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_the_version_is_that_of_the_package() -> None:
    from importlib.metadata import version

    assert CliRunner().invoke(tollgate, ["--version"], prog_name="tollgate").stdout == (
        f"tollgate {version('tollgate')}\n"
    )


def commands_below(
    command: click.Command, names: tuple[str, ...] = ("tollgate",)
) -> Iterator[tuple[str, click.Command]]:
    """Yield each command that a person may run, by its words."""
    if command.hidden:
        return
    if not isinstance(command, click.Group):
        yield " ".join(names), command
        return
    for name, below in command.commands.items():
        yield from commands_below(below, (*names, name))


def test_every_command_has_an_example_that_can_be_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = dict(commands_below(tollgate))
    assert len(found) > 50
    for name, command in found.items():
        lines = [line.strip() for line in (command.epilog or "").splitlines()]
        examples = [line for line in lines if line.startswith(name)]
        assert examples, f"{name} --help has no example of it"
        for example in examples:
            words = shlex.split(example.partition(" > ")[0].partition(" < ")[0])
            for file in words:
                if file.endswith((".json", ".toml")):
                    Path(file).touch()
            with command.make_context(name, words[len(name.split()) :]) as context:
                assert context.command is command
