"""A grammar for an output that has to call: the family's own form, with arguments that are valid by
the function's schema.

Knows no family.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engine.text.output_parser.grammars.lark import Lark, schema_rule
from engine.text.output_parser.grammars.quoted_lark import quoted_lark
from engine.text.output_parser.reading.call_format import CallFormat
from engine.text.output_parser.reading.reader import MAX_CALLS

TEXT_ARGUMENT = "input"
"""The argument of a tool that takes a text and nothing else."""


class Tool(msgspec.Struct, frozen=True):
    """A function that may be called."""

    name: str
    parameters: Mapping[str, Any] | None = None
    """JSON schema of its arguments, which are an object; None: it takes none."""
    text_lark: str | None = None
    """A grammar of the text that is its only argument, `TEXT_ARGUMENT`; None: it has a schema."""

    @property
    def schema(self) -> dict[str, Any]:
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}


def forced_calls(
    writing: CallFormat, lark: Lark, tools: Sequence[Tool], *, max_calls: int = MAX_CALLS
) -> list[str]:
    """Rules of a grammar, `calls` first: one call of one of `tools`, or several."""
    several = min(max_calls, MAX_CALLS) if writing.several else 1
    parts = [lark.text(writing.opens), "call"]
    if several > 1:
        parts.append(f"({lark.text(writing.between)} call){{0,{several - 1}}}")
    parts.append(lark.text(writing.closes))
    calls = " ".join(part for part in parts if part)
    if writing.alone:
        calls = "call" if several == 1 else f"call | {calls}"
    rules = [f"calls: {calls}", f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for index, tool in enumerate(tools):
        before, after = lark.text(writing.before(tool.name)), lark.text(writing.after)
        rules.append(f"call_{index}: {before} arguments_{index} {after}".rstrip())
        rules.append(f"arguments_{index}: {arguments_rule(tool)}")
    return rules


def arguments_rule(tool: Tool) -> str:
    """An expression that matches a tool's arguments. Raises LarkError."""
    if tool.text_lark is None:
        return schema_rule(tool.schema)
    before, after = json.dumps(f'{{"{TEXT_ARGUMENT}": "'), json.dumps('"}')
    return f"{before} %lark {{\n{quoted_lark(tool.text_lark)}\n}} {after}"
