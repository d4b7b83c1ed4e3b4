"""Turns texts and regular expressions into expressions for llguidance that match them as they stand
within a JSON string.

The library cuts what it reads into lexemes, each as long as can be, and never goes back. A lexeme
of characters that JSON writes as they are stays one. One that may both end and go on with a
backslash would swallow that of the next one: a loop over a class is cut into runs without a
backslash and single escapes, and what has another shape into single characters, which is slower.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

MAX_REPEATS = 1_000
"""The bound on `{n,m}`."""
_TOKEN = re.compile(
    r"""
      (?P<open>\((?:\?:)?+)(?!\?)
    | (?P<sign>[)|]|[*+?]\??+)
    | \{(?P<times>[0-9]{1,6}(?:,[0-9]{0,6})?)\}\??+
    | (?P<set>\[\^?+(?:\\.|[^\]\\\[&~-]|&(?!&)|~(?!~)|-(?!-))++\]|\.|\\[dDsSwW])
    | (?P<char>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[^a-zA-Z0-9]|[nrtfv0])|[^\\\[\](){}^$])
    """,
    re.VERBOSE | re.DOTALL,
)
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_ESCAPED = [chr(code) for code in range(0x20)] + ['"', "\\"]
"""The characters that JSON writes otherwise within a string."""
_PLAIN = r"[^\x00-\x1f\x22\\]"
_LOOPS = ("*", "+")


class RegexError(ValueError):
    """An error that says what of a regular expression is not supported."""


class Char(NamedTuple):
    """One character, or one of a class."""

    plain: str
    """A regular expression of those that JSON writes as they are; "": none."""
    escapes: tuple[str, ...]
    """The others, as JSON writes them."""
    pattern: re.Pattern[str]
    """The class, for Python."""
    char: str = ""
    """The only one, if it is no class."""

    @property
    def regex(self) -> str:
        if not self.escapes:
            return self.plain
        found = [self.plain] if self.plain else []
        found += [each.replace("\\", r"\\") for each in self.escapes]
        return f"(?:{'|'.join(found)})"


Element: TypeAlias = Char | str
"""A character, a bracket, `|`, or how often what comes before it is repeated."""


# ---- reading


def read_text(text: str, fold: bool) -> list[Element]:
    """Return the characters of a text. `fold`: in either case."""
    return [one(char, fold) for char in text]


@lru_cache(maxsize=1024)
def one(char: str, fold: bool) -> Char:
    variants = sorted({char, char.lower(), char.upper()}) if fold else [char]
    pattern = re.compile("|".join(map(re.escape, variants)))
    if char in _ESCAPED:
        return Char("", (json.dumps(char)[1:-1],), pattern, char)
    plain = "|".join(map(as_regex, variants))
    return Char(plain if len(variants) == 1 else f"(?:{plain})", (), pattern, char)


def as_regex(text: str) -> str:
    """Signs as codes: Lark's `/` among them."""
    return "".join(c if c.isalnum() or c > "\x7f" else f"\\x{ord(c):02x}" for c in text)


@lru_cache(maxsize=256)
def one_of(said: str, fold: bool) -> Char:
    """Read a class of characters. Raises RegexError."""
    try:
        pattern = re.compile(said, re.IGNORECASE if fold else 0)
    except re.error as error:
        raise RegexError(f"has a class that cannot be read ({error.msg})") from None
    escapes = tuple(json.dumps(char)[1:-1] for char in _ESCAPED if pattern.fullmatch(char))
    plain = said.replace("/", r"\x2f")
    if escapes:
        plain = f"[{plain}&&{_PLAIN}]"
    return Char(f"(?i:{plain})" if fold else plain, escapes, pattern)


def read_regex(said: str, flags: str, max_depth: int) -> list[Element]:
    """Read a regular expression. Raises RegexError."""
    if set(flags) - set("is"):
        raise RegexError("has flags that are not supported")
    fold, found, place, depth = "i" in flags, list[Element](), 0, 0
    while place < len(said):
        token = _TOKEN.match(said, place)
        if token is None:
            raise RegexError(f"has '{said[place : place + 8]}', which is not supported")
        place = token.end()
        repeated = token["times"] or token["sign"] not in (None, ")", "|")
        if repeated and (not found or found[-1] in ("(", "|") or is_repeat(found[-1])):
            raise RegexError(f"has '{token[0]}', which repeats nothing")
        if token["open"]:
            depth += 1
            found.append("(")
        elif token["times"]:
            found.append(repeats(token["times"]))
        elif token["set"]:
            found.append(one_of(class_of(token["set"], flags), fold))
        elif token["char"]:
            found.append(one(unescaped(token["char"]), fold))
        else:
            depth -= token["sign"] == ")"
            found.append(token["sign"][0])
        if not 0 <= depth <= max_depth:
            raise RegexError("has brackets that are not closed, or too many")
    if depth:
        raise RegexError("has brackets that are not closed, or too many")
    return found


def is_repeat(element: Element | None) -> bool:
    return isinstance(element, str) and element[:1] in ("*", "+", "?", "{")


def class_of(said: str, flags: str) -> str:
    if said == ".":
        return r"[\s\S]" if "s" in flags else r"[^\n]"
    return said if said[0] == "[" else f"[{said}]"


def unescaped(said: str) -> str:
    if said[0] != "\\":
        return said
    return chr(int(said[2:], 16)) if said[1] in "xu" else ESCAPES.get(said[1], said[1])


def repeats(said: str) -> str:
    """Check `n`, `n,` or `n,m`. Raises RegexError."""
    least, comma, most = said.partition(",")
    last = int(most or least)
    if last > MAX_REPEATS or last < int(least) or (last == 0 and (most or not comma)):
        raise RegexError(f"repeats more than {MAX_REPEATS} times, or never")
    return f"{{{said}}}"


# ---- writing


def to_expression(elements: Sequence[Element]) -> str:
    """Return an expression that matches the quoted form of what the elements match."""
    elements = without_brackets(elements)
    if not any(isinstance(each, Char) and each.escapes for each in elements):
        return lexeme(elements)
    head, loop = cut_loop(elements)
    if loop is not None and not head:
        return loop
    if loop is not None and is_closed(head):
        return f'( "" {lexeme(head)} {loop} )'
    return lexeme(elements) if is_closed(elements) else by_chars(elements)


def without_brackets(elements: Sequence[Element]) -> Sequence[Element]:
    """Take away brackets around all of it."""
    while elements and elements[0] == "(" and closing(elements, 0) == len(elements) - 1:
        elements = elements[1:-1]
    return elements


def closing(elements: Sequence[Element], at: int) -> int:
    """Return the place of the bracket that closes the one at `at`."""
    depth = 0
    for place in range(at, len(elements)):
        depth += (elements[place] == "(") - (elements[place] == ")")
        if depth == 0:
            return place
    raise AssertionError("brackets are checked when they are read")


def lexeme(elements: Sequence[Element]) -> str:
    parts = (each.regex if isinstance(each, Char) else each for each in elements)
    text = "".join("(?:" if part == "(" else part for part in parts)
    return f"/{text}/" if text else '""'


def by_chars(elements: Sequence[Element]) -> str:
    """An empty text comes first in each sequence, so that one without anything is one, too."""
    begins = {"(": '( ""', "|": '| ""'}
    parts = (lexeme([e]) if isinstance(e, Char) else begins.get(e, e) for e in elements)
    return f'( "" {" ".join(parts)} )'


def cut_loop(elements: Sequence[Element]) -> tuple[Sequence[Element], str | None]:
    """Cut off a loop over a class at the end: what comes before it, and it in runs and escapes."""
    if len(elements) < 2 or elements[-1] not in _LOOPS or has_choice(elements):
        return elements, None
    last = elements[-2]
    if not isinstance(last, Char) or not last.escapes:
        return elements, None
    escapes = Char("", last.escapes, last.pattern)
    runs = [f"/{last.plain}+/"] if last.plain else []
    return elements[:-2], f"( {' | '.join([*runs, lexeme([escapes])])} ){elements[-1]}"


def has_choice(elements: Sequence[Element]) -> bool:
    """Return whether there is a `|` outside of all brackets."""
    depth = 0
    for each in elements:
        depth += (each == "(") - (each == ")")
        if each == "|" and depth == 0:
            return True
    return False


def is_closed(elements: Sequence[Element]) -> bool:
    """Return whether a match is over where it can end: with all that must be there, or with a last
    character that nothing else takes but what must be there."""
    chars = list(with_duties(elements))
    free = [char for char, is_due in chars if not is_due]
    if not free:
        return bool(chars)
    last, is_due = chars[-1]
    sides = {last.char, last.char.lower(), last.char.upper()}
    return (
        is_due
        and bool(last.char)
        and not any(char.pattern.fullmatch(side) for char in free for side in sides)
    )


def with_duties(elements: Sequence[Element]) -> Iterator[tuple[Char, bool]]:
    """Yield the characters, each with whether it is matched exactly once in any match."""
    due = not has_choice(elements)
    place = 0
    while place < len(elements):
        each = elements[place]
        end = closing(elements, place) if each == "(" else place
        after = elements[end + 1] if end + 1 < len(elements) else None
        is_once = due and not is_repeat(after)
        if isinstance(each, Char):
            yield each, is_once
        elif each == "(":
            inner = with_duties(elements[place + 1 : end])
            yield from ((char, is_once and is_due) for char, is_due in inner)
        place = end + 1
