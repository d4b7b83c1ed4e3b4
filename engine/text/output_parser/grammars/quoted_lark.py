"""Translates Lark, as OpenAI's custom tools have it, to a grammar of the same texts as they stand
within a JSON string: `a"b` as `a\\"b`. There a model that calls functions writes a free text.

A terminal matches as much as can be, as in Lark; priorities mean nothing.

Not taken: `%ignore`, `%declare`, `%override`, `%extend`, templates, look-around, back-references,
and what llguidance adds to Lark (special tokens, `%json`, options of rules).
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import NamedTuple

from engine.text.output_parser.grammars.quoted_regex import (
    ESCAPES,
    Char,
    Element,
    RegexError,
    read_regex,
    read_text,
    repeats,
    to_expression,
)

MAX_LARK_BYTES = 32 * 1024
MAX_LARK_RULES = 500
MAX_LARK_NESTING = 64
MAX_LARK_CLASSES = 1_000
"""The bound on classes of characters, each of which takes a moment."""
MAX_LARK_ELEMENTS = 100_000
"""The bound on characters and signs of all terminals, with those that they refer to."""
MAX_SAID_CHARS = 40
"""The bound on the text quoted in an error."""
START = "start"

COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "NUMBER": r"[0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*",
    "ESCAPED_STRING": r'"([^"\\\r\n]|\\.)*"',
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
}
"""The terminals that `%import common.NAME` brings, as regular expressions."""

_TOKEN = re.compile(
    r"""
      (?P<space>(?:[ \t\r]++|//[^\n]*+|\#[^\n]*+|\n\s*+(?=\|))++)
    | (?P<line>\n\s*+)
    | (?P<alias>->[ \t]*+[a-z_][a-z0-9_]*+)
    | (?P<directive>%[a-z]++)
    | (?P<head>[?!]{0,2}[A-Za-z_][A-Za-z0-9_]*+(?:\.-?[0-9]++)?[ \t]*+:)
    | (?P<name>[A-Za-z_][A-Za-z0-9_]*+)
    | (?P<range>"(?:[^"\\\n]|\\.)++"\.\."(?:[^"\\\n]|\\.)++")
    | "(?P<text>(?:[^"\\\n]|\\.)*+)"(?P<fold>i?)
    | /(?P<regex>(?:[^/\\\n]|\\.)++)/(?P<flags>[a-z]*+)
    | ~[ \t]*+(?P<times>[0-9]{1,6}(?:\.\.[0-9]{1,6})?)
    | \{(?P<braces>[0-9]{1,6}(?:,[0-9]{0,6})?)\}
    | (?P<sign>[()\[\]|*+?])
    """,
    re.VERBOSE,
)
_IMPORT = re.compile(r"[ \t]+common(?:\.(?P<one>[A-Z_]+)|[ \t]*\((?P<many>[A-Z_, \t]+)\))")


class LarkError(ValueError):
    """An error that says what is wrong with a grammar, and where."""


@lru_cache(maxsize=64)
def quoted_lark(text: str) -> str:
    """Return a grammar for llguidance, with `start`. Raises LarkError for what is no Lark, is not
    taken or is beyond a bound."""
    if len(text.encode(errors="replace")) > MAX_LARK_BYTES:
        raise LarkError(f"a grammar of more than {MAX_LARK_BYTES} bytes")
    return _QuotedTranslation(text).lark()


class Reference(NamedTuple):
    """A terminal within another one."""

    name: str
    at: int


class _QuotedTranslation:
    def __init__(self, text: str) -> None:
        self._text = text
        self._rules: dict[str, list[str]] = {}
        """The expression of each rule, by its name in the text."""
        self._terminals: dict[str, list[Element | Reference]] = {}
        self._used: dict[str, int] = {}
        """The first place at which a rule uses each name."""
        self._names = {START: START}
        """Names in the translation: none is a terminal's there."""
        self._now: list[str] | None = None
        """The rule that is being read, or else"""
        self._terminal: list[Element | Reference] | None = None
        """the terminal."""
        self._open: list[str] = []
        self._num_elements = self._num_classes = 0

    def lark(self) -> str:
        at = 0
        while at < len(self._text):
            token = _TOKEN.match(self._text, at)
            if token is None:
                raise self._error("cannot be read", at)
            at = self._take(token, at)
        self._end_rule(at)
        if START not in self._rules:
            raise LarkError(f"a grammar without a rule '{START}'")
        for name, place in self._used.items():
            if name not in self._rules and name not in self._terminals:
                raise self._error("names a rule that is not there", place)
        found = {name: " ".join(pieces) for name, pieces in self._rules.items()}
        found |= {name: to_expression(self._whole(name, ())) for name in self._terminals}
        return "\n".join(f"{self._name(name)}: {each}" for name, each in found.items())

    def _take(self, token: re.Match[str], at: int) -> int:
        """Take a token; return where the next one begins."""
        kind = token.lastgroup
        assert kind is not None
        if kind in ("space", "alias"):
            return token.end()
        if kind == "line":
            if not self._open:
                self._end_rule(at)
            return token.end()
        if kind == "directive":
            return self._import(token, at)
        if kind == "head":
            self._begin_rule(token["head"].strip("?!: \t").partition(".")[0], at)
            return token.end()
        try:
            if self._now is not None:
                self._now += self._of_rule(token, at)
            elif self._terminal is not None:
                self._terminal += self._of_terminal(token, at)
            else:
                raise self._error("stands outside of a rule", at)
        except RegexError as error:
            raise self._error(str(error), at) from None
        return token.end()

    # ---- rules and terminals

    def _begin_rule(self, name: str, at: int) -> None:
        self._end_rule(at)
        if name in self._rules or name in self._terminals:
            raise self._error("is a rule's second definition", at)
        if len(self._rules) + len(self._terminals) == MAX_LARK_RULES:
            raise LarkError(f"a grammar of more than {MAX_LARK_RULES} rules")
        if name.lstrip("_")[:1].isupper():
            self._terminal = self._terminals[name] = []
        else:
            # An empty text first, so that a sequence without anything is one, too.
            self._now = self._rules[name] = ['""']

    def _end_rule(self, at: int) -> None:
        if self._open:
            raise self._error("comes before a bracket is closed", at)
        self._now = self._terminal = None

    def _import(self, token: re.Match[str], at: int) -> int:
        found = _IMPORT.match(self._text, token.end())
        if token["directive"] != "%import" or found is None:
            raise self._error("is not supported", at)
        for name in (found["one"] or found["many"]).replace(",", " ").split():
            if name not in COMMON:
                raise self._error(f"imports {name}, which is not supported", at)
            self._begin_rule(name, at)
            self._terminals[name] += read_regex(COMMON[name], "", MAX_LARK_NESTING)
        self._end_rule(at)
        return found.end()

    def _of_rule(self, token: re.Match[str], at: int) -> list[str]:
        """Return what a token is in a rule: texts and regular expressions are as terminals are."""
        if token["name"] is not None:
            self._used.setdefault(token["name"], at)
            return [self._name(token["name"])]
        found = self._elements(token, at)
        if found is not None:
            return [to_expression(found)]
        begins = {"(": '( ""', "|": '| ""'}
        return [begins.get(each, each) for each in self._signs(token, at)]

    def _of_terminal(self, token: re.Match[str], at: int) -> list[Element | Reference]:
        if token["name"] is not None:
            return [Reference(token["name"], at)]
        found = self._elements(token, at)
        return [*self._signs(token, at)] if found is None else ["(", *found, ")"]

    def _elements(self, token: re.Match[str], at: int) -> list[Element] | None:
        """Return the characters of a token; None: it is a sign. Raises RegexError."""
        if token["text"] is not None:
            return read_text(self._string(token["text"], at), bool(token["fold"]))
        if token["regex"] is not None:
            said = token["regex"].replace(r"\/", "/")
            found = read_regex(said, token["flags"], MAX_LARK_NESTING)
            self._num_classes += sum(isinstance(each, Char) and not each.char for each in found)
            if self._num_classes > MAX_LARK_CLASSES:
                raise LarkError(f"a grammar of more than {MAX_LARK_CLASSES} classes")
            return found
        if token["range"] is not None:
            first, last = (self._string(each, at) for each in token["range"][1:-1].split('".."'))
            if len(first) != 1 or len(last) != 1 or last < first or last > "\uffff":
                raise self._error("is no range of characters", at)
            said = f"[\\u{ord(first):04x}-\\u{ord(last):04x}]"
            return read_regex(said, "", MAX_LARK_NESTING)
        return None

    def _signs(self, token: re.Match[str], at: int) -> list[str]:
        """Brackets, alternatives and repeats mean the same there; `[x]` is `((x)?)`."""
        if token["times"] is not None:
            return [repeats(token["times"].replace("..", ","))]
        if token["braces"] is not None:  # llguidance's way to say it
            return [repeats(token["braces"])]
        sign = token["sign"]
        if sign in "([":
            self._open.append(")" if sign == "(" else "]")
            if len(self._open) > MAX_LARK_NESTING:
                raise LarkError(f"a grammar nested more than {MAX_LARK_NESTING} deep")
            return ["("] if sign == "(" else ["(", "("]
        if sign in ")]":
            if not self._open or self._open.pop() != sign:
                raise self._error("closes no bracket", at)
            return [")"] if sign == ")" else [")", "?", ")"]
        return [sign]

    def _whole(self, name: str, within: tuple[str, ...]) -> list[Element]:
        """Return a terminal with what it refers to."""
        found: list[Element] = []
        for each in self._terminals[name]:
            if not isinstance(each, Reference):
                found.append(each)
            elif each.name not in self._terminals or each.name in (*within, name):
                raise self._error("is no other terminal, within a terminal", each.at)
            else:
                found += ["(", *self._whole(each.name, (*within, name)), ")"]
        self._num_elements += len(found)
        if self._num_elements > MAX_LARK_ELEMENTS:
            raise LarkError("a grammar whose terminals are too long")
        return found

    def _name(self, name: str) -> str:
        return self._names.setdefault(name, f"r{len(self._names)}")

    def _string(self, said: str, at: int) -> str:
        try:
            found: str = json.loads(f'"{said}"')
        except ValueError:  # with escapes that JSON does not have
            found = re.sub(r"\\(.)", lambda each: ESCAPES.get(each[1], each[1]), said)
        if any("\ud800" <= char <= "\udfff" for char in found):
            raise self._error("has half of a character", at)
        return found

    def _error(self, what: str, at: int) -> LarkError:
        line = self._text.count("\n", 0, at) + 1
        said = self._text[at : at + MAX_SAID_CHARS].partition("\n")[0]
        return LarkError(f"Lark, line {line}: '{said}' {what}")
