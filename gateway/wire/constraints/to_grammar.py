"""Converts the output format that a request names to the grammar that enforces it.

Whether a grammar compiles is the engine's to say; how large one may be is said here, by the name of
the field that it came from, and that name travels along for what the engine says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from engine.protocol import MAX_GRAMMAR_BYTES, Grammar
from engine.text.output_parser.grammars.ebnf import is_ebnf
from gateway.generate_request import OutputForm
from gateway.request_errors import BadField
from gateway.wire.constraints.format_structs import (
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    StructuredOutputs,
)

ANY_OBJECT = Grammar(kind="json_schema", text='{"type":"object"}')
_encode = msgspec.json.Encoder().encode


def of_response_format(asked: ResponseFormat) -> Iterator[OutputForm]:
    match asked:
        case JsonObjectFormat():
            yield of_json_object(asked, "response_format")
        case JsonSchemaFormat():
            yield of_schema(asked.json_schema.schema, "response_format.json_schema.schema")


def of_structured_outputs(asked: StructuredOutputs) -> Iterator[OutputForm]:
    found = []
    if asked.json is not None:
        found.append(of_schema(asked.json, "structured_outputs.json"))
    if asked.json_object:
        found.append(OutputForm(ANY_OBJECT, "structured_outputs.json_object"))
    if asked.regex is not None:
        regex = Grammar(kind="regex", text=asked.regex)
        found.append(OutputForm(regex, "structured_outputs.regex"))
    if asked.choice is not None:
        found.append(of_choice(asked.choice, "structured_outputs.choice"))
    if asked.grammar is not None:
        found.append(of_grammar(asked.grammar, "structured_outputs.grammar"))
    if not found:
        raise BadField("'structured_outputs' names no form.", param="structured_outputs")
    yield from found


def of_json_object(asked: JsonObjectFormat, param: str) -> OutputForm:
    if asked.schema is None:
        return OutputForm(ANY_OBJECT, param)
    return of_schema(asked.schema, f"{param}.schema")


def of_schema(schema: dict[str, Any] | str, param: str) -> OutputForm:
    text = schema if isinstance(schema, str) else encoded(schema, param)
    return OutputForm(Grammar(kind="json_schema", text=text), param)


def of_choice(alternatives: list[str], param: str) -> OutputForm:
    return OutputForm(Grammar(kind="choice", text=encoded(alternatives, param)), param)


def of_grammar(text: str, param: str) -> OutputForm:
    return OutputForm(Grammar(kind="ebnf" if is_ebnf(text) else "lark", text=text), param)


def encoded(value: Any, param: str) -> str:
    try:
        return _encode(value).decode()
    except RecursionError as error:  # decoding it had a few frames more
        raise BadField(f"Invalid value for '{param}': nested too deep.", param=param) from error


def check_size(form: OutputForm) -> None:
    text = form.grammar.text
    if len(text) * 4 > MAX_GRAMMAR_BYTES and len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise BadField(
            f"Invalid value for '{form.param}': more than {MAX_GRAMMAR_BYTES} bytes.",
            param=form.param,
        )
