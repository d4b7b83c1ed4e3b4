"""Tells where each resolved setting comes from: a line of the file, a variable, a flag, or nobody.

What may be a secret is never shown: passwords and queries in URLs, the environment and the
arguments of MCP servers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit, urlunsplit

import msgspec

DEFAULT = "default"
HEAD = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
PART = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([A-Za-z0-9_-]+))\s*(\.)?""")
QUOTES = ('"' * 3, "'" * 3)
UNSHOWN = re.compile(r"\.(environment\.[^.]+|args)$")
FOLDERS = ("home", "secret_key_file")
"""Keys of which the complete settings say more than what is written: the whole path."""


class SettingOrigin(msgspec.Struct, frozen=True):
    """A setting. `key`: as it is written, `model[0].upstream`; `value`: JSON's types."""

    key: str
    value: Any
    source: str
    """`tollgate.toml:12`, TOLLGATE_PORT, --port, or `default`."""

    def is_below(self, key: str) -> bool:
        """Tell whether this is `key` or a part of it."""
        return self.key == key or self.key.startswith((f"{key}.", f"{key}["))


class SettingOrigins(msgspec.Struct, frozen=True, eq=False):
    """Each setting that was read, as it may be shown, and where it comes from. It tells of settings
    and is no part of them: those that differ in nothing else are equal."""

    each: tuple[SettingOrigin, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SettingOrigins)

    def __hash__(self) -> int:
        return 0


class ReadSettings(Protocol):
    """The settings, and what was read of them: `load.SettingsReport`."""

    @property
    def settings(self) -> Any: ...

    @property
    def file(self) -> Any: ...

    @property
    def path(self) -> Path | None: ...

    @property
    def sources(self) -> Mapping[str, str]: ...


def origins_of(report: ReadSettings) -> list[SettingOrigin]:
    """Return every setting, in the order of the file's tables. Raises: OSError."""
    lines = {} if report.path is None else lines_of(report.path.read_text(errors="replace"))
    written = msgspec.to_builtins(report.file, enc_hook=str)
    for key in FOLDERS:
        written[key] = str(getattr(report.settings, key))
    if not written["model"]:
        written["model"] = [
            {"name": each.name, "path": str(each.path)} for each in report.settings.models
        ]
    return [
        SettingOrigin(key, shown(key, value), source_of(key, report, lines))
        for key, value in leaves_of(written)
    ]


def leaves_of(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what is no table by its key; an empty table too, for it says that there is nothing."""
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from leaves_of(below, f"{key}.{name}" if key else name)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for position, below in enumerate(value):
            yield from leaves_of(below, f"{key}[{position}]")
    else:
        yield key, value


def source_of(key: str, report: ReadSettings, lines: Mapping[str, int]) -> str:
    """Return where a key was given: it, or the inline table or array that it stands in."""
    top = re.split(r"[.\[]", key, maxsplit=1)[0]
    if top in report.sources:
        return report.sources[top]
    above = key
    while above:
        if above in lines:
            return f"{report.path}:{lines[above]}"
        above = re.sub(r"(\.[^.\[]+|\[\d+\]|^[^.\[]+)$", "", above)
    return DEFAULT


def lines_of(content: str) -> dict[str, int]:
    """Return the line of each key that stands before a `=` in a file that was read as TOML."""
    found: dict[str, int] = {}
    counts: dict[str, int] = {}
    prefix, quote = "", None
    for number, line in enumerate(content.splitlines(), start=1):
        if quote is not None:
            quote = None if quote in line else quote
            continue
        if (head := HEAD.match(line)) is not None and "=" not in head[2]:
            prefix = _table(head[2], counts, is_array=head[1] == "[[")
            continue
        key, rest = _key(line)
        if key is not None:
            found.setdefault(f"{prefix}.{key}" if prefix else key, number)
        quote = next((each for each in QUOTES if rest.count(each) % 2), None)
    return found


def _table(head: str, counts: dict[str, int], *, is_array: bool) -> str:
    """Return the key of a table: in each array above it, of the array's newest element."""
    path = ""
    names = _parts(head)
    for position, name in enumerate(names):
        path = f"{path}.{name}" if path else name
        if position == len(names) - 1 and is_array:
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path += f"[{counts[path]}]"
    return path


def _key(line: str) -> tuple[str | None, str]:
    """Split `a.b = rest`; (None, line) of what has no key."""
    at = 0
    names = []
    while (part := PART.match(line, at)) is not None:
        names.append(next(each for each in part.groups()[:3] if each is not None))
        at = part.end()
        if part[4] is None:
            break
    rest = line[at:].lstrip()
    if names and rest.startswith("="):
        return ".".join(names), rest[1:]
    return None, line


def _parts(text: str) -> list[str]:
    return [
        next(each for each in part.groups()[:3] if each is not None) for part in PART.finditer(text)
    ]


def shown(key: str, value: Any) -> Any:
    """Return a value without what may be a secret."""
    if UNSHOWN.search(key):
        return f"({len(value)} arguments)" if isinstance(value, list) else "(set)"
    if isinstance(value, list):
        return [shown(key, each) for each in value]
    if isinstance(value, str) and "://" in value:
        return without_secrets(value)
    return value


def without_secrets(url: str) -> str:
    """Return a URL without its password and without its query."""
    try:
        parts = urlsplit(url)
        user, at, host = parts.netloc.rpartition("@")
    except ValueError:
        return "(a URL)"
    if not parts.netloc:
        return url.partition("?")[0]
    name, colon, _ = user.partition(":")
    netloc = f"{name}:***@{host}" if colon else f"{user}{at}{host}"
    query = "..." if parts.query else ""
    return urlunsplit((parts.scheme, netloc, parts.path, query, ""))
