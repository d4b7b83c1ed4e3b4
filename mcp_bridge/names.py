"""Makes the aliases by which the bridge's clients see tools and prompts: `server__tool`.

An alias is a pure function of server and name, so it does not change with the other servers. MCP
allows names of 128 characters `A-Za-z0-9_-.` (2025-11-25, server/tools, "Tool Names"); clients of
model APIs take 64 of `A-Za-z0-9_-`. A name that does not fit becomes its head and a digest of the
whole name. A server's label has no underscore, so the first `__` ends it, and a name that looks
like a shortened one is shortened too: together these make the mapping one to one.

In the *identity* namespace, which has one server, legal names stay as they are. Knows no protocol.
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
"""Names of one server whose shortened forms are remembered."""
MAX_REMEMBERED = 16_384
DIGEST_CHARS = 12
"""60 bits of SHA-256 in base 32; two names of one server with the same bits are both refused."""

SEPARATOR = "__"
IDENTITY = ""
"""The label of the namespace whose only server keeps its names."""

BASE32 = "abcdefghijklmnopqrstuvwxyz234567"
LABEL = re.compile(r"[a-z0-9](?:-?[a-z0-9])*")
ALIAS = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_ALIAS_CHARS}}}")
SHORTENED = re.compile(rf".*_x[a-z2-7]{{{DIGEST_CHARS}}}", re.DOTALL)
ILLEGAL = re.compile(r"[^A-Za-z0-9_-]+")


def checked_label(label: str) -> str:
    """Return `label` if it is 1 to 24 of `a-z0-9` with single hyphens between them.

    Raises: NameRefused.
    """
    if len(label) > MAX_LABEL_CHARS or not LABEL.fullmatch(label):
        raise NameRefused(
            f"server {label[:MAX_LABEL_CHARS]!r}: a label has 1 to {MAX_LABEL_CHARS} of a-z, 0-9 "
            "and single hyphens between them"
        )
    return label


def alias_of(label: str, name: str) -> str:
    """Return the alias of `name` at the server `label`: at most 64 of `A-Za-z0-9_-`.

    IDENTITY leaves legal names as they are. Raises: NameRefused, for an empty or too long name.
    """
    return _cached_alias(label, name) if len(name) <= MAX_ALIAS_CHARS else _alias_of(label, name)


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


_cached_alias = lru_cache(maxsize=MAX_REMEMBERED)(_alias_of)
"""Each list of a thousand tools needs a thousand aliases."""


def digest_of(name: str) -> str:
    # A lone surrogate has no UTF-8, and its name still needs an alias of its own.
    bits = int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest(), "big")
    return "".join(BASE32[(bits >> (5 * place)) & 31] for place in range(DIGEST_CHARS))


class ShortenedNames:
    """The original names of one server by their shortened forms.

    Two names with one shortened form are both refused: the server could choose which one a call
    reaches.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._ambiguous: set[str] = set()

    def note(self, shortened: str, name: str) -> None:
        """Raises: NameRefused."""
        if shortened not in self._names and len(self._names) >= MAX_SHORTENED:
            self._names.clear()
            self._ambiguous.clear()
        if self._names.setdefault(shortened, name) != name:
            self._ambiguous.add(shortened)
        if shortened in self._ambiguous:
            raise NameRefused(
                f"{name[:MAX_ALIAS_CHARS]!r} and another name have one alias: {shortened}"
            )

    def get(self, shortened: str) -> str | None:
        return None if shortened in self._ambiguous else self._names.get(shortened)
