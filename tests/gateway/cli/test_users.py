"""Users from the command line, in a real database: the way in for the first owner."""

from __future__ import annotations

import json
import os
import pty
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway.cli.main import tollgate
from tests.gateway.cli.test_main import environ, folder, invoke

__all__ = ["environ", "folder"]

PASSWORD = "correct horse battery"


def typed(environ: dict[str, str], password: str, *arguments: str) -> Result:
    """With `password` on standard input."""
    runner = CliRunner(env=environ)
    return runner.invoke(tollgate, [*arguments], input=password + "\n")


@pytest.fixture
def installed(environ: dict[str, str], folder: Path) -> dict[str, str]:
    assert invoke(environ, "migrate").exit_code == 0
    return environ


def test_a_user_is_made_listed_and_given_another_password(installed: dict[str, str]) -> None:
    made = typed(installed, PASSWORD, "users", "create", "--email", "Ada@Example.com")
    assert made.exit_code == 0, made.output
    assert made.stdout.endswith(" is ada@example.com, owner of default.\n")
    assert PASSWORD not in made.output
    more = ("--name", "Bob", "--role", "reader", "--json")
    bob = typed(installed, PASSWORD, "users", "create", "--email", "bob@example.com", *more)
    assert json.loads(bob.stdout)["role"] == "reader"
    twice = typed(installed, PASSWORD, "users", "create", "--email", "ada@example.com")
    assert twice.exit_code == 2 and "address" in twice.stderr
    listed = invoke(installed, "users", "list", "--json")
    found = [json.loads(line) for line in listed.stdout.splitlines()]
    assert [each["email"] for each in found] == ["ada@example.com", "bob@example.com"]
    assert "hash" not in listed.stdout
    header, *lines = invoke(installed, "users", "list").stdout.splitlines()
    assert header.split() == ["ID", "CREATED", "ROLE", "EMAIL", "NAME"] and len(lines) == 2
    changed = typed(installed, PASSWORD + "2", "users", "passwd", "--email", "ada@example.com")
    assert changed.exit_code == 0 and changed.stdout.endswith(" has a new password.\n")
    for command in (("passwd",), ("link",)):
        nobody = typed(installed, PASSWORD, "users", *command, "--email", "no@example.com")
        assert nobody.exit_code == 2


def test_a_link_signs_somebody_in_or_makes_the_first_owner(installed: dict[str, str]) -> None:
    for arguments in ((), ("--email", "ada@example.com")):
        made = invoke(installed, "users", "link", *arguments)
        assert made.exit_code == 0, made.output
        assert "/oauth/link?token=" in made.stdout and len(made.stdout.splitlines()) == 1
        typed(installed, PASSWORD, "users", "create", "--email", "ada@example.com")


def test_ctrl_c_ends_the_prompt_for_a_password(installed: dict[str, str]) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        command = [*(sys.executable, "-m", "gateway", "users", "create"), "--email", "a@x.example"]
        os.execve(sys.executable, command, {**os.environ, **installed})
    seen = b""
    while b"Password: " not in seen:
        seen += os.read(terminal, 1024)
    os.write(terminal, b"\x03")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 1


def test_a_weak_password_is_refused_before_anything_is_done(installed: dict[str, str]) -> None:
    for weak in ("", "short", "a" * 20, "someone@example.com"):
        refused = typed(installed, weak, "users", "create", "--email", "Someone@example.com")
        assert refused.exit_code == 2 and "password" in refused.stderr.lower(), weak
    assert invoke(installed, "users", "list", "--json").stdout == ""
