"""Follows one JSON value (RFC 8259) while its characters come.

Keeps none of it but the word it is in: a number or a literal.
"""

from __future__ import annotations

import re
from typing import Literal

MAX_DEPTH = 100
"""The nesting bound of arrays and objects: later readers recurse."""
MAX_NUMBER_CHARS = 1000
"""Python refuses integers of more than 4300 digits."""

State = Literal[
    "value", "item or end", "key", "key or end", "colon", "comma or end",
    "string", "escape", "hex", "word",
]  # fmt: skip

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_BEGUN = re.compile(r"-?((0|[1-9][0-9]*)(\.([0-9]+([eE][+-]?[0-9]*)?)?|[eE][+-]?[0-9]*)?)?")
_LITERALS = ("true", "false", "null")
_WORD_BEGINS = frozenset("-0123456789tfn")
_CLOSER = {"{": "}", "[": "]"}


class JsonText:
    """One value from its first character on. A number that is the whole value has no end of its
    own, so it is never complete."""

    def __init__(self) -> None:
        self.is_complete = False
        self.is_broken = False
        """The next character cannot be part of a value."""
        self._state: State = "value"
        self._closers: list[str] = []
        self._in_key = False
        self._word = ""
        self._hex_left = 0

    def take(self, text: str, at: int) -> int:
        """The place in `text`, from `at` on, up to which the value goes on."""
        while at < len(text) and not (self.is_complete or self.is_broken):
            if self._state == "string":
                at = _end_of_plain(text, at)
                if at == len(text):
                    break
            if self._state == "word" and not self._goes_on(text[at]):
                self._end_word()  # the character is what comes behind it
                continue
            self._step(text[at])
            if not self.is_broken:
                at += 1
        return at

    def _step(self, char: str) -> None:
        match self._state:
            case "string":
                self._in_string(char)
            case "escape":
                self._escaped(char)
            case "hex":
                self._hex(char)
            case "word":
                self._word += char
                if self._word in _LITERALS:
                    self._end_word()
            case _:
                if char not in " \t\n\r":
                    self._between(char)

    def _in_string(self, char: str) -> None:
        if char == "\\":
            self._state = "escape"
        elif char != '"':
            self.is_broken = True
        elif self._in_key:
            self._in_key, self._state = False, "colon"
        else:
            self._end_value()

    def _escaped(self, char: str) -> None:
        if char == "u":
            self._state, self._hex_left = "hex", 4
        elif char in '"\\/bfnrt':
            self._state = "string"
        else:
            self.is_broken = True

    def _hex(self, char: str) -> None:
        if char not in "0123456789abcdefABCDEF":
            self.is_broken = True
            return
        self._hex_left -= 1
        if not self._hex_left:
            self._state = "string"

    def _between(self, char: str) -> None:
        """A character that is neither white nor within a string or a word."""
        state = self._state
        ends = state in ("item or end", "key or end", "comma or end")
        if ends and self._closers and char == self._closers[-1]:
            self._closers.pop()
            self._end_value()
        elif state == "comma or end" and char == ",":
            self._state = "key" if self._closers[-1] == "}" else "value"
        elif state in ("key", "key or end") and char == '"':
            self._in_key, self._state = True, "string"
        elif state == "colon" and char == ":":
            self._state = "value"
        elif state in ("value", "item or end"):
            self._begin_value(char)
        else:
            self.is_broken = True

    def _begin_value(self, char: str) -> None:
        if char == '"':
            self._state = "string"
        elif char in _CLOSER and len(self._closers) < MAX_DEPTH:
            self._closers.append(_CLOSER[char])
            self._state = "key or end" if char == "{" else "item or end"
        elif char in _WORD_BEGINS:
            self._state, self._word = "word", char
        else:
            self.is_broken = True

    def _goes_on(self, char: str) -> bool:
        """Whether `char` is part of the word."""
        longer = self._word + char
        if any(literal.startswith(longer) for literal in _LITERALS):
            return True
        return len(longer) <= MAX_NUMBER_CHARS and bool(_NUMBER_BEGUN.fullmatch(longer))

    def _end_word(self) -> None:
        if self._word in _LITERALS or _NUMBER.fullmatch(self._word):
            self._word = ""
            self._end_value()
        else:
            self.is_broken = True

    def _end_value(self) -> None:
        self._state = "comma or end"
        self.is_complete = not self._closers


def _end_of_plain(text: str, at: int) -> int:
    found = _PLAIN.match(text, at)
    assert found is not None  # it matches nothing, too
    return found.end()
