"""The pages quote errors that the program has, and commands and options that it takes."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import click
import pytest

from gateway.cli.main import tollgate
from tests.test_tidy import ROOMS, ROOT, python_files, relative, tree_of

PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")),
]
SPOKEN_IN = (*(f"{room}/" for room in ROOMS), "migrations/", "requirements/")
CODE = re.compile(r"^    .+$|(?<=`)[^`\n]+(?=`)|(?<=```bash\n)[^`]+", re.M)
COMMAND = re.compile(r"(?:^|\s|bin/)tollgate ([a-z][^\n#|;&)]*)")
WORD = "\0"
"""It stands for a value within a text of the program."""


def spoken(node: ast.AST) -> str:
    """Return a text of the program, with `WORD` for each value in it."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(spoken, node.values))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace("\n", " ")
    return WORD


@cache
def texts() -> str:
    """Return all of them, a line each. The trees are not kept: each later collection of garbage in
    this process would walk them."""
    files = (path for path in python_files() if relative(path).startswith(SPOKEN_IN))
    nodes = (node for path in files for node in ast.walk(tree_of(path)))
    found = "\n".join(
        spoken(each) for each in nodes if isinstance(each, ast.JoinedStr | ast.Constant)
    )
    tree_of.cache_clear()
    return found


def is_said(quoted: str) -> bool:
    """Tell whether the words around the `...` stand in one text of the program, in their order."""
    parts = [part for each in quoted.split("...") if (part := each.strip())]
    return re.search(".*".join(map(re.escape, parts)), texts()) is not None


def quoted_errors() -> list[str]:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    titles = re.findall(r"^### (.+)$", page, re.M)
    return [each for title in titles for each in re.findall(r"`([^`]+)`", title)]


def test_an_error_that_nobody_says_would_be_found() -> None:
    assert is_said("... is in use by a running ...")
    assert not is_said("... is in use by a walking ...")


def test_every_quoted_error_is_one_of_the_program() -> None:
    found = quoted_errors()
    assert len(found) >= 30
    assert [each for each in found if not is_said(each)] == []


def wrong_in(command: str) -> str | None:
    """Return the word of `tollgate COMMAND` that the program would not take."""
    at: click.Command = tollgate
    words = iter(command.split())
    for word in words:
        if word == "--":  # what follows is of another program
            return None
        name, _, value = word.strip("`'\".,:[]").partition("=")
        if name.startswith("--"):
            found = next((each for each in at.params if name in names_of(each)), None)
            if found is None and name not in ("--help", "--version") and at.name != "engine":
                return name
            if isinstance(found, click.Option) and not found.is_flag and not value:
                next(words, None)
        elif isinstance(at, click.Group) and name.islower():
            if name not in at.commands:
                return name
            at = at.commands[name]
    return None


def names_of(param: click.Parameter) -> list[str]:
    return [*param.opts, *param.secondary_opts]


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_command_of_a_page_is_one_of_the_program(page: Path) -> None:
    commands = [
        found[1] for code in CODE.findall(page.read_text()) for found in COMMAND.finditer(code)
    ]
    wrong = [f"{each}: {what}" for each in commands if (what := wrong_in(each)) is not None]
    assert wrong == []


@pytest.mark.parametrize("command", ["key create", "keys mak", "keys create --nam x"])
def test_a_command_that_is_none_would_be_found(command: str) -> None:
    assert wrong_in(command) is not None
