"""The settings file's text with one key of an MCP server otherwise: nothing else of it moves.

What comes out is read again and has to say exactly what was wanted; a file that is written in
another way is left as it is.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from gateway.settings.file import SettingsError
from gateway.settings.load import load

OF_SERVERS = re.compile(r"\s*\[\[\s*mcp\s*\.\s*servers\s*\]\]")
ANY_TABLE = re.compile(r"\s*\[")


def to_toml(value: Any) -> str:
    """Write a string, or lists and tables of them, as TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {to_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def with_key(content: str, name: str, key: str, value: Any) -> str:
    """Set another value of one key of a server's table.

    Raises: click.ClickException, where it cannot be told apart.
    """
    lines = content.splitlines(keepends=True)
    wanted, servers, position, heads = _read(content, lines, name)
    servers[position][key] = value
    line = f"{key} = {to_toml(value)}\n"
    if position < len(heads):
        head = heads[position]
        end = _end(lines, head, ANY_TABLE)
        own = re.compile(rf"\s*{re.escape(key)}\s*=")
        at = next((each for each in range(head + 1, end) if own.match(lines[each])), None)
        first = head + 1 if at is None else at
        behinds = [first] if at is None else range(at + 1, end + 1)
        for behind in behinds:
            found = "".join([*lines[:first], line, *lines[behind:]])
            if _readable(found) == wanted:
                return found
    raise click.ClickException(f"{name}: write it by hand: {line.strip()}")


def rewrite(path: Path, content: str, flags: Mapping[str, str | int | Path | None]) -> None:
    """The settings file, if it can be read then; else it stays as it was."""
    descriptor, beside = tempfile.mkstemp(dir=path.absolute().parent, suffix=".toml")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(content)
        if path.exists():
            os.chmod(beside, path.stat().st_mode)
        try:
            load({**flags, "config": beside})
        except SettingsError as error:
            raise click.ClickException(str(error).replace(beside, str(path))) from None
        os.replace(beside, path)
    finally:
        Path(beside).unlink(missing_ok=True)


def _read(
    content: str, lines: list[str], name: str
) -> tuple[dict[str, Any], list[dict[str, Any]], int, list[int]]:
    """Return what the file says, its servers, the position of the one with that name, and the lines
    where servers begin."""
    said = tomllib.loads(content)
    servers = said["mcp"]["servers"]
    position = [each.get("name") for each in servers].index(name)
    heads = [at for at, line in enumerate(lines) if OF_SERVERS.match(line)]
    return said, servers, position, heads


def _end(lines: list[str], head: int, table: re.Pattern[str]) -> int:
    ends = (at for at in range(head + 1, len(lines)) if table.match(lines[at]))
    return next(ends, len(lines))


def _readable(content: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(content)
    except tomllib.TOMLDecodeError:
        return None
