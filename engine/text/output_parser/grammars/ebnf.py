"""GBNF, as llama.cpp and xgrammar read it (`root ::= "a" | [0-9]+`), to the dialect of Lark that
llguidance reads.

Linear in the text. A rule may go on over any number of lines, up to where the next one begins. Not
taken: look-ahead `(= …)`, calls `Tag(…)`, token references `<[1]>`.

Rules get names of their own, `start` and `r1`, `r2`, …, so that no name of the text can mean
anything to the library. Nothing becomes a terminal, which the library's own translation makes of a
rule without references: what a terminal matches is as long as can be, so `w "b"` with
`w ::= [a-z]+` could never end.
"""

from __future__ import annotations

import json
import re

MAX_EBNF_BYTES = 32 * 1024
MAX_EBNF_RULES = 500
MAX_EBNF_NESTING = 64
MAX_EBNF_REPEATS = 1_000
"""The bound on `{n,m}`."""
MAX_SAID_CHARS = 40
"""The bound on the text quoted in an error."""

ROOT = "root"
_HEAD = re.compile(r"(?:\s++|#[^\n]*+)*+[A-Za-z0-9_-]++[ \t]*+::=")
_TOKEN = re.compile(
    r"""
      (?P<space>(?:\s++|\#[^\n\r]*+)++)
    | (?P<head>[A-Za-z0-9_-]++)[ \t]*+::=
    | (?P<name>[A-Za-z0-9_-]++)
    | "(?P<text>(?:[^"\\\n\r]|\\.)*+)"
    | \[(?P<chars>(?:[^\]\\\n\r]|\\.)*+)\]
    | (?P<any>\.)
    | \{(?P<times>\s*+[0-9]{1,6}\s*+(?:,\s*+(?:[0-9]{1,6}\s*+)?)?)\}
    | (?P<sign>[()|*+?])
    """,
    re.VERBOSE,
)
_PIECE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL
)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"} | {c: c for c in "\"'\\[]-^/"}
_LAST_CHAR = 0x10FFFF


class EbnfError(ValueError):
    """An error that says what is wrong with a grammar, and where."""


def is_ebnf(text: str) -> bool:
    """Whether it begins with a rule as GBNF writes it, which Lark never does."""
    return _HEAD.match(text) is not None


def ebnf_to_lark(text: str) -> str:
    """The same grammar for llguidance, `root` as `start`. Raises EbnfError where it is none, or
    beyond a bound."""
    if len(text.encode(errors="replace")) > MAX_EBNF_BYTES:
        raise EbnfError(f"EBNF of more than {MAX_EBNF_BYTES} bytes")
    return _Translation(text).lark()


class _Translation:
    def __init__(self, text: str) -> None:
        self._text = text
        self._rules: dict[str, list[str]] = {}
        """The translation of each rule, by its name in the text."""
        self._used: dict[str, int] = {}
        """The first place at which each rule is named."""
        self._names = {ROOT: "start"}
        """In Lark."""
        self._now: list[str] | None = None
        self._open = 0
        self._repeatable = False
        """Whether the last thing can be followed by `*`."""

    def lark(self) -> str:
        at = 0
        while at < len(self._text):
            token = _TOKEN.match(self._text, at)
            if token is None:
                raise self._error("cannot be read", at)
            kind = token.lastgroup
            assert kind is not None
            if kind != "space":
                self._take(kind, token[kind], at)
            at = token.end()
        self._end_rule(at)
        if ROOT not in self._rules:
            raise EbnfError(f"EBNF without a rule '{ROOT}'")
        for name, place in self._used.items():
            if name not in self._rules:
                raise self._error("names a rule that is not there", place)
        return "\n".join(
            f"{self._lark_name(name)}: {' '.join(pieces)}" for name, pieces in self._rules.items()
        )

    def _take(self, kind: str, said: str, at: int) -> None:
        if kind == "head":
            self._begin_rule(said, at)
            return
        if self._now is None:
            raise self._error("stands before the first rule", at)
        if kind == "sign":
            self._now.append(self._sign(said, at))
        elif kind == "times":
            self._now.append(self._times(said, at))
        else:
            self._now.append(self._atom(kind, said, at))
            self._repeatable = True

    def _begin_rule(self, name: str, at: int) -> None:
        self._end_rule(at)
        if name in self._rules:
            raise self._error("is a rule's second definition", at)
        if len(self._rules) == MAX_EBNF_RULES:
            raise EbnfError(f"EBNF of more than {MAX_EBNF_RULES} rules")
        # An empty text first, in each sequence, so that one without anything is one, too.
        self._now = self._rules[name] = ['""']
        self._repeatable = False

    def _end_rule(self, at: int) -> None:
        if self._open:
            raise self._error("comes before a bracket is closed", at)

    def _sign(self, sign: str, at: int) -> str:
        if sign in "*+?":
            self._repeat(at)
            return sign
        self._repeatable = sign == ")"
        if sign == ")":
            self._open -= 1
            if self._open < 0:
                raise self._error("closes no bracket", at)
            return sign
        if sign == "(":
            self._open += 1
            if self._open > MAX_EBNF_NESTING:
                raise EbnfError(f"EBNF nested more than {MAX_EBNF_NESTING} deep")
        return f'{sign} ""'

    def _times(self, said: str, at: int) -> str:
        self._repeat(at)
        least, comma, most = (each.strip() for each in said.partition(","))
        if max(int(least), int(most or 0)) > MAX_EBNF_REPEATS:
            raise self._error(f"repeats more than {MAX_EBNF_REPEATS} times", at)
        if most and int(most) < int(least):
            raise self._error("repeats at most fewer times than at least", at)
        return f"{{{least}{comma}{most}}}"

    def _repeat(self, at: int) -> None:
        if not self._repeatable:
            raise self._error("repeats nothing", at)
        self._repeatable = False

    def _atom(self, kind: str, said: str, at: int) -> str:
        if kind == "name":
            self._used.setdefault(said, at)
            return self._lark_name(said)
        if kind == "any":
            return f"/[\\x00-{chr(_LAST_CHAR)}]/"  # Lark's dot leaves out the end of a line
        chars = self._chars(said, at)
        if kind == "text":  # Lark's strings are JSON's
            return json.dumps("".join(char for char, _ in chars), ensure_ascii=False)
        return self._class(chars, at)

    def _lark_name(self, name: str) -> str:
        return self._names.setdefault(name, f"r{len(self._names)}")

    def _chars(self, said: str, at: int) -> list[tuple[str, bool]]:
        """Each with whether it stood there as itself."""
        chars = []
        for two, four, eight, escaped, plain in _PIECE.findall(said):
            code = two or four or eight
            if code:
                number = int(code, 16)
                if number > _LAST_CHAR:
                    raise self._error("has a code of no character", at)
                char = chr(number)
            elif escaped and escaped not in _ESCAPED:
                raise self._error(f"has an unknown escape \\{escaped}", at)
            else:
                char = _ESCAPED[escaped] if escaped else plain
            if "\ud800" <= char <= "\udfff":
                raise self._error("has half of a character", at)
            chars.append((char, not code and not escaped))
        return chars

    def _class(self, chars: list[tuple[str, bool]], at: int) -> str:
        negated = chars[:1] == [("^", True)]
        pieces = ["/[^" if negated else "/["]
        place = int(negated)
        if place == len(chars):
            raise self._error("is a class of nothing", at)
        while place < len(chars):
            first = last = chars[place][0]
            if place + 2 < len(chars) and chars[place + 1] == ("-", True):
                last = chars[place + 2][0]
                place += 2
            if last < first:
                raise self._error("has a range that ends before it begins", at)
            pieces.append(f"{_in_class(first)}-{_in_class(last)}")
            place += 1
        return "".join([*pieces, "]/"])

    def _error(self, what: str, at: int) -> EbnfError:
        line = self._text.count("\n", 0, at) + 1
        said = self._text[at : at + MAX_SAID_CHARS].partition("\n")[0]
        return EbnfError(f"EBNF, line {line}: '{said}' {what}")


def _in_class(char: str) -> str:
    """Signs as codes: `&&`, `--` and `~~` would be operators."""
    plain = char > "\x7f" or char.isalnum()
    return char if plain else f"\\x{ord(char):02x}"
