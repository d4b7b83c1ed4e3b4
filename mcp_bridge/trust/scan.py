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
from functools import lru_cache
from itertools import islice

import msgspec
from msgspec import structs

from mcp_bridge.canonical_json import Parts, pointer, walk
from mcp_bridge.errors import NotCanonical, SchemaRefused
from mcp_bridge.pinning import Kind, Pin
from mcp_bridge.text_safety.confusables import mixed_words, name_skeleton
from mcp_bridge.text_safety.data_links import data_links
from mcp_bridge.text_safety.encoded_text import decoded, spaced
from mcp_bridge.text_safety.hidden_text import hidden, visible
from mcp_bridge.text_safety.instruction_score import SURE, Demand, find_demand
from mcp_bridge.text_safety.instruction_text import MAX_TEXT_CHARS, Severity, instructions
from mcp_bridge.text_safety.odd_names import disorder, oddity
from mcp_bridge.trust.demands import find_demands

MAX_FINDINGS = 100
MAX_DETAIL_CHARS = 160
PADDING = re.compile(r"\s{120}")
"""So much white space pushes what follows out of every dialog's view."""

RANK: Mapping[Severity, int] = {"low": 0, "medium": 1, "high": 2}
HIDING_SEVERITY: Mapping[str, Severity] = {"private_use": "medium"}
GUESSED = frozenset(["rot13", "reversed", "leet"])
"""Encodings that any text can be read as, so that only what is clear in them counts."""
DESCRIBING = frozenset(
    f"instruction_{name}"
    for name in (
        "secrecy",
        "secrets",
        "conversation",
        "redirection",
        "precedence",
        "preference",
    )
)
"""Codes of phrases with which tools describe themselves, too: `lists API keys`."""
SCHEMAS = ("inputSchema", "outputSchema")
ICON_SCHEMES = ("https://", "data:image/")
DISTINCT = re.compile(r"(?=.*[_-]|.*[a-z][A-Z]).{5,}")
"""A name that is no plain word: found in a text, it means the tool."""

NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
TOKEN = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,126}[A-Za-z0-9])?")
QUOTED = tuple(
    re.compile(pattern)
    for pattern in (
        r"[`'\"]([A-Za-z0-9_-]{1,128})[`'\"]",
        r"\b([A-Za-z0-9_-]{1,128}) tool\b",
        r"\btool ([A-Za-z0-9_-]{1,128})",
    )
)


PLAIN_WORD = re.compile(r"[A-Za-z0-9_.$:/+-]{0,40}")
"""A word or name, in which nothing can be hidden and that says nothing."""
MAX_KNOWN = 4_096
MAX_KNOWN_CHARS = 2_000
Suspicion = tuple[str, Severity, str]
"""A finding without its place: code, severity, detail."""


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
    past_bounds = False
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
        past_bounds = True
        found.append(Finding("not_canonical", error.param, "high", error.message))
    if not past_bounds:
        found = scan_demands(value, found)
    if kind == "tool" and isinstance(value, Mapping) and not past_bounds:
        found += scan_names(value)
    if kind == "tool" and isinstance(value, Mapping):
        found += scan_schemas(value)
    if isinstance(value, Mapping):
        found += scan_icons(value)
    unique = dict.fromkeys(found)
    return tuple(sorted(unique, key=lambda one: -RANK[one.severity])[:MAX_FINDINGS])


def scan_text(text: str, parts: Parts) -> Iterator[Finding]:
    if PLAIN_WORD.fullmatch(text):
        return
    found = known_suspicions(text) if len(text) <= MAX_KNOWN_CHARS else suspicions_in(text)
    if found:
        path = visible(pointer(parts))
        for code, severity, detail in found:
            yield Finding(code, path, severity, detail)


def suspicions_in(text: str) -> tuple[Suspicion, ...]:
    return tuple(suspicions(text))


@lru_cache(maxsize=MAX_KNOWN)
def known_suspicions(text: str) -> tuple[Suspicion, ...]:
    """Return the same as `suspicions_in`, for texts that come again and again."""
    return suspicions_in(text)


def suspicions(text: str) -> Iterator[Suspicion]:
    """Yield what is suspicious about a text, wherever it stands: (code, severity, detail)."""
    kinds: dict[str, int] = {}
    for one in islice(hidden(text), 10_000):
        kinds[one.hiding] = kinds.get(one.hiding, 0) + 1
    for hiding, count in kinds.items():
        severity = HIDING_SEVERITY.get(hiding, "high")
        yield f"hidden_{hiding}", severity, f"{count} of them: {shown(text)}"
    if PADDING.search(text):
        yield "padding", "medium", "white space that pushes text out of view"
    if len(text) > MAX_TEXT_CHARS:
        yield "long_text", "medium", f"read up to {MAX_TEXT_CHARS} characters only"
    for name, how_bad, match in instructions(text):
        yield f"instruction_{name}", how_bad, shown(match)
    for code, how_bad, match in data_links(text[:MAX_TEXT_CHARS]):
        yield f"carrying_{code}", how_bad, shown(match)
    yield from encoded(text)
    for word in mixed_words(text)[:3]:
        yield "mixed_script", "medium", shown(ascii(word))


def encoded(text: str) -> Iterator[Suspicion]:
    """Yield one suspicion for each encoding in which a text hides an instruction."""
    seen: set[str] = set()
    for encoding, said in decoded(text):
        if encoding in seen:
            continue
        found = [
            (how_bad, match) for name, how_bad, match in instructions(said) if name != "encoded"
        ]
        weighed = find_demand(said)
        if weighed is not None:
            found.append((severity_of(weighed), weighed.where))
        clear = [match for how_bad, match in found if encoding not in GUESSED or how_bad == "high"]
        if clear:
            seen.add(encoding)
            yield f"encoded_{encoding}", "high", shown(clear[0])
    for phrase in islice(spaced(text), 1):
        yield "encoded_spaced", "high", shown(phrase)


def scan_demands(value: object, found: list[Finding]) -> list[Finding]:
    """Return `found` with what a definition asks of a model. Phrases that describe as well as
    instruct stay in view, and count for nothing where no sentence asks for anything."""
    demands = [
        Finding(each.code, visible(pointer(parts)), severity_of(each), shown(each.where))
        for parts, each in islice(find_demands(value), MAX_FINDINGS)
    ]
    if not demands:
        found = [
            structs.replace(one, severity="low") if one.code in DESCRIBING else one for one in found
        ]
    return [*found, *demands]


def severity_of(demand: Demand) -> Severity:
    return "high" if demand.score >= SURE else "medium"


def scan_names(tool: Mapping[str, object]) -> Iterator[Finding]:
    """Yield findings of the tool's name and the names of its arguments."""
    why = disorder(str(tool.get("name")))
    if why is not None:
        yield Finding("odd_name", "/name", "medium", why)
    named: list[tuple[Parts, object]] = []
    for member in SCHEMAS:
        named += [
            ((member, *parts, key), key)
            for parts, inner in walk(tool.get(member))
            if parts[-1:] == ("properties",) and isinstance(inner, Mapping)
            for key in inner
        ]
    for place, name in named:
        why = oddity(name) if isinstance(name, str) else None
        if why is not None:
            yield Finding("odd_name", visible(pointer(place)), "medium", why)


def shown(text: str) -> str:
    return visible(text)[:MAX_DETAIL_CHARS]


def scan_schemas(tool: Mapping[str, object]) -> Iterator[Finding]:
    from mcp_bridge.validation.arguments import compile_schema  # its library takes 3 MB of memory

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
    offered: Iterable[LabelledPin], of: str | None = None
) -> dict[tuple[str, Kind, str], tuple[Finding, ...]]:
    """Return what is suspicious about things beside each other, by (server, kind, name). `of`: of
    this server alone."""
    names = [one for one in offered if one.pin.kind in ("tool", "prompt")]
    found: dict[tuple[str, Kind, str], list[Finding]] = {}
    for one, finding in [*alike(names), *speaking(names, of)]:
        mine = found.setdefault((one.server, one.pin.kind, one.pin.name), [])
        if len(mine) < MAX_FINDINGS:
            mine.append(finding)
    return {key: tuple(findings) for key, findings in found.items()}


def alike(names: list[LabelledPin]) -> Iterator[tuple[LabelledPin, Finding]]:
    classes: dict[tuple[Kind, str], list[LabelledPin]] = {}
    servers: dict[tuple[Kind, str], set[str]] = {}
    for one in names:
        classes.setdefault((one.pin.kind, name_skeleton(one.pin.name)), []).append(one)
        servers.setdefault((one.pin.kind, one.pin.name), set()).add(one.server)
    for same in classes.values():
        distinct = sorted({(one.server, one.pin.name) for one in same})
        if len(distinct) < 2:
            continue
        for one in same:
            # The first four have three others of any: a class may have ten thousand.
            others = [each for each in distinct[:4] if each != (one.server, one.pin.name)][:3]
            equal = len(servers[one.pin.kind, one.pin.name]) > 1
            detail = "as " + ", ".join(f"{server}: {name}" for server, name in others)
            code = "shadowing" if equal else "lookalike"
            yield one, Finding(code, "/name", "medium" if equal else "high", shown(detail))


def speaking(names: list[LabelledPin], of: str | None) -> Iterator[tuple[LabelledPin, Finding]]:
    owners: dict[str, set[str]] = {}
    for one in names:
        owners.setdefault(one.pin.name, set()).add(one.server)
        owners.setdefault(f"{one.server}__{one.pin.name}", set()).add(one.server)
    if len({one.server for one in names}) < 2:
        return  # nobody else's tools to speak of
    for one in names:
        for parts, text in texts_of(one.pin) if of in (None, one.server) else ():
            for name in mentioned(text, owners):
                if one.server not in owners[name]:
                    detail = f"speaks of {name} of {min(owners[name])}"
                    path = visible(pointer(parts))
                    yield one, Finding("cross_reference", path, "high", shown(detail))


def texts_of(pin: Pin) -> Iterator[tuple[Parts, str]]:
    for parts, value in walk(pin.value()):
        if isinstance(value, str) and parts != ("name",):
            yield parts, value


def mentioned(text: str, names: Mapping[str, object]) -> set[str]:
    """Return the names that a text may mention: tokens that are no words, and quoted words."""
    found = {token for token in TOKEN.findall(text) if token in names}
    if not found and not (names.keys() & set(NAME.findall(text))):
        return set()
    distinct = {token for token in found if DISTINCT.fullmatch(token)}
    quoted = {name for pattern in QUOTED for name in pattern.findall(text)}
    return distinct | (quoted & names.keys())
