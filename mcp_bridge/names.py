"""What a tool or prompt is called in front of the bridge: `server__tool`.

The name is a pure function of server and tool, so it stays when others come and go. MCP lets a
name have 128 characters of `A-Za-z0-9_-.` (2025-11-25, server/tools, "Tool Names"); the clients
of model APIs take 64 of `A-Za-z0-9_-`. What does not fit is shortened to its head and a digest of
the whole. A server's label has no underscore, so the first `__` ends it; a name that reads like a
shortened one is itself shortened: both together make the map one to one.

In the *identity* namespace, of one upstream, names stay as they are where clients take them.
Above: the catalogue and the bridge. Knows no protocol.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache

import msgspec

from mcp_bridge.errors import NameRefused

MAX_ALIAS_CHARS = 64
MAX_LABEL_CHARS = 24
MAX_UPSTREAM_NAME_CHARS = 1_024
MAX_ALIASES = 20_000
MAX_REMEMBERED = 16_384
DIGEST_CHARS = 12
"""60 bits of SHA-256 in base 32: two names of one server that share them are refused by name."""

SEPARATOR = "__"
IDENTITY = ""
"""The label of the namespace whose one upstream's names stay as they are."""

BASE32 = "abcdefghijklmnopqrstuvwxyz234567"
LABEL = re.compile(r"[a-z0-9](?:-?[a-z0-9])*")
ALIAS = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_ALIAS_CHARS}}}")
SHORTENED = re.compile(rf".*_x[a-z2-7]{{{DIGEST_CHARS}}}", re.DOTALL)
ILLEGAL = re.compile(r"[^A-Za-z0-9_-]+")


class Refusal(msgspec.Struct, frozen=True):
    """A name that stays hidden, and why; `alias` is empty where none could be made."""

    server: str
    name: str
    alias: str
    reason: str


class AliasMap(msgspec.Struct, frozen=True):
    """Both directions of the map, and what it refused."""

    aliases: Mapping[tuple[str, str], str]
    targets: Mapping[str, tuple[str, str]]
    refused: tuple[Refusal, ...]

    def alias_of(self, server: str, name: str) -> str | None:
        return self.aliases.get((server, name))

    def target_of(self, alias: str) -> tuple[str, str] | None:
        """(server, name) behind an alias; None for one that nobody was given."""
        return self.targets.get(alias)


def checked_label(label: str) -> str:
    """`label`, or NameRefused: 1 to 24 of `a-z0-9` with single hyphens between them."""
    if len(label) > MAX_LABEL_CHARS or not LABEL.fullmatch(label):
        raise NameRefused(
            f"server {label[:MAX_LABEL_CHARS]!r}: a label has 1 to {MAX_LABEL_CHARS} of a-z, 0-9 "
            "and single hyphens between them"
        )
    return label


def alias_of(label: str, name: str) -> str:
    """What clients call `name` of the server `label`; IDENTITY leaves legal names as they are.

    At most 64 characters of `A-Za-z0-9_-`. NameRefused for an empty or endless name.
    """
    return _remembered(label, name) if len(name) <= MAX_ALIAS_CHARS else _alias_of(label, name)


def _alias_of(label: str, name: str) -> str:
    if not 0 < len(name) <= MAX_UPSTREAM_NAME_CHARS:
        raise NameRefused(
            f"server {label!r}: a name has 1 to {MAX_UPSTREAM_NAME_CHARS} characters, "
            f"not {len(name)}"
        )
    prefix = f"{checked_label(label)}{SEPARATOR}" if label != IDENTITY else ""
    plain = prefix + name
    if ALIAS.fullmatch(plain) and not SHORTENED.fullmatch(name):
        return plain
    tail = f"_x{digest_of(name)}"
    head = ILLEGAL.sub("_", name)[: MAX_ALIAS_CHARS - len(prefix) - len(tail)]
    return prefix + head + tail


_remembered = lru_cache(maxsize=MAX_REMEMBERED)(_alias_of)
"""A list of a thousand tools asks for as many, each time."""


def digest_of(name: str) -> str:
    # A lone surrogate has no UTF-8; it still must make one alias and no other's.
    bits = int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest(), "big")
    return "".join(BASE32[(bits >> (5 * place)) & 31] for place in range(DIGEST_CHARS))


def build_aliases(named: Iterable[tuple[str, str]]) -> AliasMap:
    """The map of all (label, name). What cannot be told apart is refused by name, every one of
    it, so that the order in which servers answer decides nothing.

    NameRefused for more than MAX_ALIASES, and for the identity namespace beside others.
    """
    wanted = list(named)
    if len(wanted) > MAX_ALIASES:
        raise NameRefused(f"more than {MAX_ALIASES} names behind one door")
    labels = {label for label, _ in wanted}
    if IDENTITY in labels and len(labels) > 1:
        raise NameRefused("the identity namespace has one upstream; name the servers instead")
    made: list[tuple[str, str, str]] = []
    refused: list[Refusal] = []
    for label, name in wanted:
        try:
            made.append((label, name, alias_of(label, name)))
        except NameRefused as error:
            shown = name[:MAX_ALIAS_CHARS]
            refused.append(Refusal(label[:MAX_LABEL_CHARS], shown, "", str(error)))
    counts = Counter(alias for _, _, alias in made)
    aliases: dict[tuple[str, str], str] = {}
    targets: dict[str, tuple[str, str]] = {}
    for label, name, alias in made:
        if counts[alias] > 1:
            refused.append(Refusal(label, name, alias, f"{counts[alias]} names are one: {alias}"))
            continue
        aliases[label, name] = alias
        targets[alias] = (label, name)
    return AliasMap(aliases, targets, tuple(refused))
