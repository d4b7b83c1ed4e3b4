"""Completion of commands in each shell, and what `--help` loads."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from gateway.cli.main import tollgate

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
