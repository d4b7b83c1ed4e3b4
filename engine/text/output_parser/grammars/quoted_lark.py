"""Translates Lark, as OpenAI's custom tools have it, to a grammar of the same texts as they stand
within a JSON string: `a"b` as `a\\"b`. There a model that calls functions writes a free text.

Linear in the text. Everything becomes rules over single characters: a terminal would match as much
as can be, and behind `/.+/` the `\\` of a quoted end of line could no longer begin anything. So a
text is matched that the rules can make in any way, and Lark's priorities mean nothing.

Not taken: `%ignore`, `%declare`, `%override`, `%extend`, templates, look-around, back-references,
and what llguidance adds to Lark (special tokens, `%json`, options of rules).
"""

from __future__ import annotations

import json
import re
from functools import lru_cache

MAX_LARK_BYTES = 32 * 1024
MAX_LARK_RULES = 500
MAX_LARK_NESTING = 64
MAX_LARK_REPEATS = 1_000
"""The bound on `{n,m}` of a regular expression and `~n..m` of Lark."""
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
_REGEX_TOKEN = re.compile(
    r"""
      (?P<open>\((?:\?:)?+)(?!\?)
    | (?P<sign>[)|]|[*+?]\??+)
    | \{(?P<times>[0-9]{1,6}(?:,[0-9]{0,6})?)\}\??+
    | (?P<set>\[\^?+(?:\\.|[^\]\\\[&~-]|&(?!&)|~(?!~)|-(?!-))++\]|\.|\\[dDsSwW])
    | (?P<char>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[^a-zA-Z0-9]|[nrtfv0])|[^\\\[\](){}^$])
    """,
    re.VERBOSE | re.DOTALL,
)
_IMPORT = re.compile(r"[ \t]+common(?:\.(?P<one>[A-Z_]+)|[ \t]*\((?P<many>[A-Z_, \t]+)\))")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_ESCAPED = [chr(code) for code in range(0x20)] + ['"', "\\"]
"""The characters that JSON writes otherwise within a string."""
_PLAIN = r"[^\x00-\x1f\"\\\\]"


class LarkError(ValueError):
    """An error that says what is wrong with a grammar, and where."""


@lru_cache(maxsize=64)
def quoted_lark(text: str) -> str:
    """Return a grammar for llguidance, with `start`. Raises LarkError for what is no Lark, is not
    taken or is beyond a bound."""
    if len(text.encode(errors="replace")) > MAX_LARK_BYTES:
        raise LarkError(f"a grammar of more than {MAX_LARK_BYTES} bytes")
    return _QuotedTranslation(text).lark()


def quoted_char(char: str) -> str:
    """An expression that matches a character as JSON writes it."""
    return json.dumps(json.dumps(char, ensure_ascii=False)[1:-1], ensure_ascii=False)


class _QuotedTranslation:
    def __init__(self, text: str) -> None:
        self._text = text
        self._rules: dict[str, list[str]] = {}
        """The translation of each rule and terminal, by its name in the text."""
        self._used: dict[str, int] = {}
        """The first place at which each name is used."""
        self._names = {START: START}
        """In the translation: nothing may be a terminal there."""
        self._now: list[str] | None = None
        self._open: list[str] = []
        self._classes: dict[tuple[str, str], tuple[str, str]] = {}
        """A rule for each class of characters, by how that is written: its name and expression."""

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
            if name not in self._rules:
                raise self._error("names a rule that is not there", place)
        rules = {self._name(name): " ".join(pieces) for name, pieces in self._rules.items()}
        rules |= dict(self._classes.values())
        return "\n".join(f"{name}: {expression}" for name, expression in rules.items())

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
            self._begin_rule(token["head"], at)
            return token.end()
        if self._now is None:
            raise self._error("stands outside of a rule", at)
        self._now += self._expression(token, at)
        return token.end()

    def _expression(self, token: re.Match[str], at: int) -> list[str]:
        if token["text"] is not None:
            return self._literal(token["text"], token["fold"], at)
        if token["regex"] is not None:
            return self._regex(token["regex"].replace(r"\/", "/"), token["flags"], at)
        if token["range"] is not None:
            return self._range(token["range"], at)
        if token["name"] is not None:
            self._used.setdefault(token["name"], at)
            return [self._name(token["name"])]
        if token["times"] is not None:
            return [self._times(token["times"].replace("..", ","), at)]
        if token["braces"] is not None:  # llguidance's way to say it
            return [self._times(token["braces"], at)]
        return [self._sign(token["sign"], at)]

    # ---- rules

    def _begin_rule(self, head: str, at: int) -> None:
        self._end_rule(at)
        name = head.strip("?!: \t").partition(".")[0]
        self._add_rule(name, at)

    def _add_rule(self, name: str, at: int) -> None:
        if name in self._rules:
            raise self._error("is a rule's second definition", at)
        if len(self._rules) == MAX_LARK_RULES:
            raise LarkError(f"a grammar of more than {MAX_LARK_RULES} rules")
        # An empty text first, so that a sequence without anything is one, too.
        self._now = self._rules[name] = ['""']

    def _end_rule(self, at: int) -> None:
        if self._open:
            raise self._error("comes before a bracket is closed", at)
        self._now = None

    def _import(self, token: re.Match[str], at: int) -> int:
        found = _IMPORT.match(self._text, token.end())
        if token["directive"] != "%import" or found is None:
            raise self._error("is not supported", at)
        self._end_rule(at)
        for name in (found["one"] or found["many"]).replace(",", " ").split():
            if name not in COMMON:
                raise self._error(f"imports {name}, which is not supported", at)
            self._add_rule(name, at)
            assert self._now is not None
            self._now += self._regex(COMMON[name], "", at)
        self._now = None
        return found.end()

    def _name(self, name: str) -> str:
        return self._names.setdefault(name, f"r{len(self._names)}")

    def _sign(self, sign: str, at: int) -> str:
        """Brackets, alternatives and repeats mean the same there; `[x]` is `(x)?`."""
        if sign in "([":
            self._open.append(")" if sign == "(" else "]")
            if len(self._open) > MAX_LARK_NESTING:
                raise LarkError(f"a grammar nested more than {MAX_LARK_NESTING} deep")
            return '( ""'
        if sign in ")]":
            if not self._open or self._open.pop() != sign:
                raise self._error("closes no bracket", at)
            return ")" if sign == ")" else ")?"
        return '| ""' if sign == "|" else sign

    def _times(self, said: str, at: int) -> str:
        least, comma, most = said.partition(",")
        last = int(most or least)
        if last > MAX_LARK_REPEATS or last < int(least) or (last == 0 and (most or not comma)):
            raise self._error(f"repeats more than {MAX_LARK_REPEATS} times, or never", at)
        return f"{{{least}{comma}{most}}}"

    # ---- characters

    def _literal(self, said: str, fold: str, at: int) -> list[str]:
        chars = self._string(said, at)
        if not fold:
            return ["(", '""', *map(quoted_char, chars), ")"]
        either = (sorted({char, char.lower(), char.upper()}) for char in chars)
        return ["(", '""', *(f"({' | '.join(map(quoted_char, each))})" for each in either), ")"]

    def _range(self, said: str, at: int) -> list[str]:
        first, last = (self._string(each, at) for each in said[1:-1].split('".."'))
        if len(first) != 1 or len(last) != 1 or last < first or last > "\uffff":
            raise self._error("is no range of characters", at)
        return self._regex(f"[\\u{ord(first):04x}-\\u{ord(last):04x}]", "", at)

    def _string(self, said: str, at: int) -> str:
        try:
            found: str = json.loads(f'"{said}"')
        except ValueError:  # with escapes that JSON does not have
            found = re.sub(r"\\(.)", lambda each: _ESCAPES.get(each[1], each[1]), said)
        if any("\ud800" <= char <= "\udfff" for char in found):
            raise self._error("has half of a character", at)
        return found

    def _regex(self, said: str, flags: str, at: int) -> list[str]:
        """A regular expression as an expression of rules."""
        if set(flags) - set("is"):
            raise self._error("has flags that are not supported", at)
        pieces, place, depth = ["(", '""'], 0, 0
        while place < len(said):
            token = _REGEX_TOKEN.match(said, place)
            if token is None:
                raise self._error(f"has '{said[place : place + 8]}', which is not supported", at)
            place = token.end()
            if token["open"]:
                depth += 1
                pieces.append('( ""')
            elif token["times"]:
                pieces.append(self._times(token["times"], at))
            elif token["set"]:
                pieces.append(self._class(token["set"], flags, at))
            elif token["char"]:
                pieces += self._char(token["char"], flags, at)
            else:
                sign = token["sign"]
                depth -= sign == ")"
                pieces.append('| ""' if sign == "|" else sign[0])
            if not 0 <= depth <= MAX_LARK_NESTING:
                raise self._error("has brackets that are not closed, or too many", at)
        if depth:
            raise self._error("has brackets that are not closed, or too many", at)
        return [*pieces, ")"]

    def _char(self, said: str, flags: str, at: int) -> list[str]:
        if said[0] != "\\":
            char = said
        elif said[1] in "xu":
            char = chr(int(said[2:], 16))
        else:
            char = _ESCAPES.get(said[1], said[1])
        return self._literal(json.dumps(char)[1:-1], "i" if "i" in flags else "", at)

    def _class(self, said: str, flags: str, at: int) -> str:
        """Return the name of a rule for any character of a class: as it is, or escaped."""
        if said == ".":
            said = r"[\s\S]" if "s" in flags else r"[^\n]"
        elif said[0] != "[":
            said = f"[{said}]"
        fold = "i" if "i" in flags else ""
        key = (said, fold)
        if key not in self._classes:
            try:
                found = re.compile(said, re.IGNORECASE if fold else 0)
            except re.error as error:
                raise self._error(f"has a class that cannot be read ({error.msg})", at) from None
            inner = said.replace("/", r"\/")
            plain = f"/[{inner}&&{_PLAIN}]/{fold}"
            others = [quoted_char(char) for char in _ESCAPED if found.fullmatch(char)]
            self._classes[key] = f"c{len(self._classes)}", " | ".join([plain, *others])
        return self._classes[key][0]

    def _error(self, what: str, at: int) -> LarkError:
        line = self._text.count("\n", 0, at) + 1
        said = self._text[at : at + MAX_SAID_CHARS].partition("\n")[0]
        return LarkError(f"Lark, line {line}: '{said}' {what}")
