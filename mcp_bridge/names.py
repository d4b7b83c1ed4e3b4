"""Names tools and prompts as the bridge's clients see them: `server__tool`.

The name is a pure function of server and tool, so it stays when others come and go. MCP lets a
name have 128 characters of `A-Za-z0-9_-.` (2025-11-25, server/tools, "Tool Names"); the clients
of model APIs take 64 of `A-Za-z0-9_-`. What does not fit is shortened to its head and a digest of
the whole. A server's label has no underscore, so the first `__` ends it; a name that reads like a
shortened one is itself shortened: both together make the map one to one.

In the *identity* namespace, of one upstream, names stay as they are where clients take them. Knows
no protocol.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache

from mcp_bridge.errors import NameRefused

MAX_ALIAS_CHARS = 64
MAX_LABEL_CHARS = 24
MAX_UPSTREAM_NAME_CHARS = 1_024
MAX_SHORTENED = 10_000
"""Names of one server that are remembered by what was made of them."""
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


def checked_label(label: str) -> str:
    """Return `label`, or raise NameRefused: 1 to 24 of `a-z0-9` with single hyphens between
    them."""
    if len(label) > MAX_LABEL_CHARS or not LABEL.fullmatch(label):
        raise NameRefused(
            f"server {label[:MAX_LABEL_CHARS]!r}: a label has 1 to {MAX_LABEL_CHARS} of a-z, 0-9 "
            "and single hyphens between them"
        )
    return label


def alias_of(label: str, name: str) -> str:
    """Return what clients call `name` of the server `label`; IDENTITY leaves legal names as they
    are.

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


class ShortenedNames:
    """Names of one server that clients cannot take, by what was made of them. Two of which the same
    was made are both refused, by name: which of them a call would reach is the server's choice."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._several: set[str] = set()

    def note(self, made: str, name: str) -> None:
        """Raises: NameRefused."""
        if made not in self._names and len(self._names) >= MAX_SHORTENED:
            self._names.clear()
            self._several.clear()
        if self._names.setdefault(made, name) != name:
            self._several.add(made)
        if made in self._several:
            raise NameRefused(f"{name[:MAX_ALIAS_CHARS]!r} and another name are one: {made}")

    def get(self, made: str) -> str | None:
        return None if made in self._several else self._names.get(made)
