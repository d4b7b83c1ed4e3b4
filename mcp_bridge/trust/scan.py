"""Finds what in a server's offer looks like an attack: advice for who approves, and for policy.

`scan` reads one thing at every path, keys too: hidden text (UTS #55), text that speaks to the
model, words of mixed script (UTS #39), schemas past the bounds, icons of other schemes.
`scan_together` reads the catalogue of all servers: one name from two servers (shadowing), names
that look alike, descriptions that speak of another server's tools.

Findings are values; nothing is changed or hidden here. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

import msgspec

from mcp_bridge.canonical_json import Parts, pointer, walk
from mcp_bridge.errors import NotCanonical, SchemaRefused
from mcp_bridge.pinning import Kind, Pin
from mcp_bridge.text_safety.confusables import mixed_words, name_skeleton
from mcp_bridge.text_safety.hidden_text import hidden, visible
from mcp_bridge.text_safety.instruction_text import MAX_TEXT_CHARS, Severity, instructions
from mcp_bridge.validation.arguments import compile_schema

MAX_FINDINGS = 100
MAX_DETAIL_CHARS = 160
PADDING = re.compile(r"\s{120}")
"""So much white space pushes what follows out of every dialog's view."""

RANK: Mapping[Severity, int] = {"low": 0, "medium": 1, "high": 2}
HIDING_SEVERITY: Mapping[str, Severity] = {"private_use": "medium"}
SCHEMAS = ("inputSchema", "outputSchema")
ICON_SCHEMES = ("https://", "data:image/")
DISTINCT = re.compile(r"(?=.*[_-]|.*[a-z][A-Z]).{5,}")
"""A name that is no plain word: found in a text, it means the tool."""

TOKEN = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,126}[A-Za-z0-9])?")
QUOTED = tuple(
    re.compile(pattern)
    for pattern in (
        r"[`'\"]([A-Za-z0-9_-]{1,128})[`'\"]",
        r"\b([A-Za-z0-9_-]{1,128}) tool\b",
        r"\btool ([A-Za-z0-9_-]{1,128})",
    )
)


class Finding(msgspec.Struct, frozen=True):
    """A finding: what, where (JSON pointer, made visible), how bad, in words."""

    code: str
    path: str
    severity: Severity
    detail: str


class LabelledPin(msgspec.Struct, frozen=True):
    """A pin with the label of its server."""

    server: str
    pin: Pin


def worst(findings: Iterable[Finding]) -> Severity | None:
    """Return the worst severity, by which policy may block."""
    return max((one.severity for one in findings), key=RANK.__getitem__, default=None)


def scan(kind: Kind, value: object) -> tuple[Finding, ...]:
    """Return what is suspicious about one tool, prompt, resource, template, instructions or launch
    spec, worst first, at most MAX_FINDINGS."""
    found: list[Finding] = []
    try:
        for parts, one in walk(value):
            if isinstance(one, str):
                found += scan_text(one, parts)
            elif isinstance(one, Mapping):
                for key in one:
                    found += scan_text(str(key), (*parts, key))
            if len(found) > MAX_FINDINGS:
                break
    except NotCanonical as error:
        found.append(Finding("not_canonical", error.param, "high", error.message))
    if kind == "tool" and isinstance(value, Mapping):
        found += scan_schemas(value)
    if isinstance(value, Mapping):
        found += scan_icons(value)
    unique = dict.fromkeys(found)
    return tuple(sorted(unique, key=lambda one: -RANK[one.severity])[:MAX_FINDINGS])


def scan_text(text: str, parts: Parts) -> Iterator[Finding]:
    path = visible(pointer(parts))
    kinds: dict[str, int] = {}
    for one in islice(hidden(text), 10_000):
        kinds[one.hiding] = kinds.get(one.hiding, 0) + 1
    for hiding, count in kinds.items():
        severity = HIDING_SEVERITY.get(hiding, "high")
        yield Finding(f"hidden_{hiding}", path, severity, f"{count} of them: {shown(text)}")
    if PADDING.search(text):
        yield Finding("padding", path, "medium", "white space that pushes text out of view")
    if len(text) > MAX_TEXT_CHARS:
        yield Finding("long_text", path, "medium", f"read up to {MAX_TEXT_CHARS} characters only")
    for name, how_bad, match in instructions(text):
        yield Finding(f"instruction_{name}", path, how_bad, shown(match))
    for word in mixed_words(text)[:3]:
        yield Finding("mixed_script", path, "medium", shown(ascii(word)))


def shown(text: str) -> str:
    return visible(text)[:MAX_DETAIL_CHARS]


def scan_schemas(tool: Mapping[str, object]) -> Iterator[Finding]:
    for member in SCHEMAS:
        if member not in tool:
            continue
        try:
            compiled = compile_schema(tool[member])
        except SchemaRefused as error:
            path = visible(f"/{member}{error.param}")
            yield Finding("schema_refused", path, "high", shown(error.message))
            continue
        if compiled.engine == "killable":
            detail = "a pattern that needs backtracking"
            yield Finding("schema_backtracking", f"/{member}", "low", detail)


def scan_icons(thing: Mapping[str, object]) -> Iterator[Finding]:
    icons = thing.get("icons")
    for at, icon in enumerate(icons if isinstance(icons, list) else []):
        source = icon.get("src") if isinstance(icon, Mapping) else None
        if not isinstance(source, str) or not source.startswith(ICON_SCHEMES):
            yield Finding("icon_scheme", f"/icons/{at}/src", "medium", shown(str(source)))


def scan_together(
    offered: Iterable[LabelledPin],
) -> dict[tuple[str, Kind, str], tuple[Finding, ...]]:
    """Return what is suspicious about things beside each other, by (server, kind, name)."""
    things = list(offered)
    names = [one for one in things if one.pin.kind in ("tool", "prompt")]
    found: dict[tuple[str, Kind, str], list[Finding]] = {}
    for one, finding in [*alike(names), *speaking(names)]:
        mine = found.setdefault((one.server, one.pin.kind, one.pin.name), [])
        if len(mine) < MAX_FINDINGS:
            mine.append(finding)
    return {key: tuple(findings) for key, findings in found.items()}


def alike(names: list[LabelledPin]) -> Iterator[tuple[LabelledPin, Finding]]:
    classes: dict[tuple[Kind, str], list[LabelledPin]] = {}
    for one in names:
        classes.setdefault((one.pin.kind, name_skeleton(one.pin.name)), []).append(one)
    for same in classes.values():
        distinct = {(one.server, one.pin.name) for one in same}
        if len(distinct) < 2:
            continue
        for one in same:
            others = sorted(distinct - {(one.server, one.pin.name)})[:3]
            equal = any(name == one.pin.name for _, name in others)
            detail = "as " + ", ".join(f"{server}: {name}" for server, name in others)
            code = "shadowing" if equal else "lookalike"
            yield one, Finding(code, "/name", "medium" if equal else "high", shown(detail))


def speaking(names: list[LabelledPin]) -> Iterator[tuple[LabelledPin, Finding]]:
    owners: dict[str, set[str]] = {}
    for one in names:
        owners.setdefault(one.pin.name, set()).add(one.server)
        owners.setdefault(f"{one.server}__{one.pin.name}", set()).add(one.server)
    for one in names:
        for parts, text in texts_of(one.pin):
            for name in mentioned(text):
                whose = owners.get(name, set())
                if whose and one.server not in whose:
                    detail = f"speaks of {name} of {min(whose)}"
                    path = visible(pointer(parts))
                    yield one, Finding("cross_reference", path, "high", shown(detail))


def texts_of(pin: Pin) -> Iterator[tuple[Parts, str]]:
    for parts, value in walk(pin.value()):
        if isinstance(value, str) and parts != ("name",):
            yield parts, value


def mentioned(text: str) -> set[str]:
    """Return the names that a text may mention: tokens that are no words, and quoted words."""
    found = {token for token in TOKEN.findall(text) if DISTINCT.fullmatch(token)}
    found.update(name for pattern in QUOTED for name in pattern.findall(text))
    return found
