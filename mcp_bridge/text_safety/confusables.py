"""Finds names that look the same: skeletons of UTS #39, section 4, with Unicode's confusables.

Two names are look-alikes when their skeletons are equal. In names of tools, case and the
separators `-`, `_` and `.` are ignored. The table is that of `confusable_homoglyphs`, which has
each pair in both directions; all that is connected in it is one class. It takes 8 MB, so it is
loaded when it is asked first. Pure.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache

from foundation.normal_forms import normalized
from mcp_bridge.text_safety.hidden_text import SUSPECT

SEPARATORS = re.compile(r"[-_.\s]+")
WORD = re.compile(r"\w+")
FOREIGN = frozenset(
    ["CYRILLIC", "GREEK", "ARMENIAN", "CHEROKEE", "COPTIC", "FULLWIDTH", "MATHEMATICAL", "LISU"]
)
"""Scripts with letters that look Latin, by the first word of a character's name."""

MAX_LOOKS = 8
"""Rounds of replacement: a prototype may itself consist of characters that have prototypes."""


@cache
def prototypes() -> dict[str, str]:
    """Return the prototype of each confusable character: one text for all that look like it."""
    from confusable_homoglyphs import confusables

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
            # A text that contains a character of this class would grow with each replacement.
            texts = [each for each in alike if len(each) == 1 or alike.isdisjoint(each)]
            found.update(dict.fromkeys(alike, min(texts, key=preference)))
    return {char: looks for char, looks in found.items() if len(char) == 1}


def bare_of(text: str) -> str:
    """Return a text without the marks that the table sets around right-to-left letters."""
    return SUSPECT.sub("", text)


def connected(start: str, pairs: dict[str, set[str]]) -> set[str]:
    seen, waiting = {start}, [start]
    while waiting:
        new = pairs[waiting.pop()] - seen
        seen |= new
        waiting.extend(new)
    return seen


def preference(text: str) -> tuple[bool, int, str]:
    """Return a sort key for prototypes: ASCII first, then longer ones, as `rn` for `m`."""
    return (not text.isascii(), -len(text), text)


def skeleton(text: str) -> str:
    """Return a text that is equal for texts that look the same; it is compared, never shown."""
    table = prototypes()
    bare = normalized("NFD", bare_of(text))
    for _ in range(MAX_LOOKS):
        mapped = "".join(table.get(char, char) for char in bare)
        mapped = normalized("NFD", mapped)
        if mapped == bare:
            break
        bare = mapped
    return bare


def name_skeleton(name: str) -> str:
    """Return the `skeleton` of a tool's name, which ignores case and separators."""
    # Case is folded between two skeletons: `I` looks like `l` and `O` like `0`; `i` and `o` do not.
    bare = SEPARATORS.sub("", normalized("NFKC", name))
    return skeleton(skeleton(bare).replace("0", "o").casefold())


def mixed_words(text: str) -> list[str]:
    """Return words that mix Latin letters with letters of another script that look Latin."""
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
