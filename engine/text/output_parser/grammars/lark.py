"""Pieces of a grammar in the dialect of Lark that llguidance reads.

Knows the library's words and not the library, which runs in the engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from engine.protocol import Grammar
from engine.text.output_parser.grammars.ebnf import ebnf_to_lark

JSON_WHITESPACE = r"[ ]|\n[ \t]{0,64}"
"""Between what a schema is about: as JSON is usually written, on one line or indented. Any amount
of it would be valid, and a model may never stop."""


class Lark:
    """Pieces of a grammar over one vocabulary."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        """`token_ids`: of markers that the library matches as tokens and never as text."""
        self._token_ids = token_ids
        self._markers = re.compile("|".join(map(re.escape, token_ids)) or "(?!)")

    def text(self, text: str) -> str:
        """An expression that matches `text`, the markers in it as tokens."""
        pieces: list[str] = []
        at = 0
        for found in self._markers.finditer(text):
            pieces += [_string(text[at : found.start()]), f"<[{self._token_ids[found[0]]}]>"]
            at = found.end()
        pieces.append(_string(text[at:]))
        return " ".join(piece for piece in pieces if piece)

    def up_to(self, rule: str, marker: str) -> list[str]:
        """A rule that matches anything up to the first `marker`, and it."""
        if marker in self._token_ids:
            return [f"{rule}: /(.|\\n)*/ {self.text(marker)}"]
        return [f"{rule}[lazy]: /(.|\\n)*{re.escape(marker).replace('/', chr(92) + '/')}/"]


def is_matched_as_token(marker: str, *, special: bool) -> bool:
    """Return whether an added token is matched as one: how llguidance reads a tokenizer.json."""
    return special or (marker.startswith("<") and marker.endswith(">"))


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""  # Lark's strings are JSON's


def schema_rule(schema: Mapping[str, Any]) -> str:
    """An expression that matches what is valid by a JSON schema."""
    options = {"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}}
    return f"%json {json.dumps({**schema, **options}, ensure_ascii=False)}"


def grammar_rule(grammar: Grammar) -> str:
    """An expression that matches what `grammar` does. Raises msgspec.DecodeError for a schema or a
    choice that is no JSON, EbnfError."""
    match grammar.kind:
        case "json_schema":
            return schema_rule(msgspec.json.decode(grammar.text, type=dict[str, Any]))
        case "regex":
            escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", grammar.text, flags=re.S)
            return f"/{escaped.replace(chr(10), chr(92) + 'n')}/"
        case "choice":
            return " | ".join(map(_string, msgspec.json.decode(grammar.text, type=list[str])))
        case "lark":
            return f"%lark {{\n{grammar.text}\n}}"
        case "ebnf":
            return f"%lark {{\n{ebnf_to_lark(grammar.text)}\n}}"
