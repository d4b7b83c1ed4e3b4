"""Finds names that look the same: skeletons of UTS #39, section 4, with Unicode's confusables.

Two names are look-alikes when their skeletons are equal. For names of tools, case and the
separators `-`, `_` and `.` say nothing either. The table is that of `confusable_homoglyphs`,
which has each pair in both directions; whatever is connected there is one class.

Pure.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache

from confusable_homoglyphs import confusables

from mcp_bridge.text_safety.hidden_text import SUSPECT

SEPARATORS = re.compile(r"[-_.\s]+")
WORD = re.compile(r"\w+")
FOREIGN = frozenset(
    ["CYRILLIC", "GREEK", "ARMENIAN", "CHEROKEE", "COPTIC", "FULLWIDTH", "MATHEMATICAL", "LISU"]
)
"""Scripts, by the first word of a character's name, that have letters which look Latin."""

MAX_LOOKS = 8
"""What stands for a character may itself be of characters that look alike."""


@cache
def prototypes() -> dict[str, str]:
    """Return, for each character that looks like others, the one text that stands for all of
    them."""
    pairs: dict[str, set[str]] = {}
    for marked, others in confusables.confusables_data.items():
        char = bare_of(marked)
        for other in others:
            looks = bare_of(other["c"])
            if char and looks and char != looks:
                pairs.setdefault(char, set()).add(looks)
                pairs.setdefault(looks, set()).add(char)
    found: dict[str, str] = {}
    for char in pairs:
        if char not in found:
            alike = connected(char, pairs)
            # What is several characters, one of them of this very class, would grow with each look.
            texts = [each for each in alike if len(each) == 1 or alike.isdisjoint(each)]
            found.update(dict.fromkeys(alike, min(texts, key=preference)))
    return {char: looks for char, looks in found.items() if len(char) == 1}


def bare_of(text: str) -> str:
    """Return a text without the marks that the table sets around letters written from right to
    left."""
    return SUSPECT.sub("", text)


def connected(start: str, pairs: dict[str, set[str]]) -> set[str]:
    seen, waiting = {start}, [start]
    while waiting:
        new = pairs[waiting.pop()] - seen
        seen |= new
        waiting.extend(new)
    return seen


def preference(text: str) -> tuple[bool, int, str]:
    """Return the order of stand-ins: several characters, as `rn` for `m`, stand for one; ASCII for
    what is not."""
    return (not text.isascii(), -len(text), text)


def skeleton(text: str) -> str:
    """Equal for texts that look the same; a skeleton is compared, never shown."""
    table = prototypes()
    bare = unicodedata.normalize("NFD", bare_of(text))
    for _ in range(MAX_LOOKS):
        mapped = "".join(table.get(char, char) for char in bare)
        mapped = unicodedata.normalize("NFD", mapped)
        if mapped == bare:
            break
        bare = mapped
    return bare


def name_skeleton(name: str) -> str:
    """Return the `skeleton` of a tool's name: case and separators say nothing.

    Case goes between two skeletons: `I` looks like `l` and `O` like `0`, and `i` and `o` do not.
    """
    bare = SEPARATORS.sub("", unicodedata.normalize("NFKC", name))
    return skeleton(skeleton(bare).replace("0", "o").casefold())


def mixed_words(text: str) -> list[str]:
    """Words of Latin letters with letters of another script that look Latin among them."""
    if text.isascii():
        return []
    return [
        word
        for word in WORD.findall(text)
        if not word.isascii()
        and any("a" <= char.lower() <= "z" for char in word)
        and any(unicodedata.name(char, "").split(" ")[0] in FOREIGN for char in word)
        and skeleton(word).isascii()
    ]
