"""The form of an answer: each way to ask for one, and what cannot be kept to names its field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.protocol import MAX_GRAMMAR_BYTES, Grammar
from gateway.generate_request import OutputForm
from gateway.request_errors import BadField
from gateway.wire.openai.from_chat import from_openai

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": 1.0}}}
AS_TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"const":1.0}}}'


def form(**fields: Any) -> OutputForm | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    prompt = from_openai(json.dumps(body).encode(), "engine").prompt
    assert prompt is not None
    return prompt.form


def json_schema(**fields: Any) -> dict[str, Any]:
    described = {"name": "answer", "schema": SCHEMA, **fields}
    return {"type": "json_schema", "json_schema": described}


ASKED = [
    ("response_format", json_schema(strict=True), "json_schema", AS_TEXT, ".json_schema.schema"),
    (
        "response_format",
        json_schema(description="d"),
        "json_schema",
        AS_TEXT,
        ".json_schema.schema",
    ),
    ("response_format", {"type": "json_object"}, "json_schema", '{"type":"object"}', ""),
    ("structured_outputs", {"json": SCHEMA}, "json_schema", AS_TEXT, ".json"),
    ("structured_outputs", {"json": AS_TEXT}, "json_schema", AS_TEXT, ".json"),
    (
        "structured_outputs",
        {"json_object": True},
        "json_schema",
        '{"type":"object"}',
        ".json_object",
    ),
    ("structured_outputs", {"regex": "a+"}, "regex", "a+", ".regex"),
    ("structured_outputs", {"choice": ["é", "b"]}, "choice", '["é","b"]', ".choice"),
    ("structured_outputs", {"grammar": 'start: "x"'}, "lark", 'start: "x"', ".grammar"),
    ("guided_json", SCHEMA, "json_schema", AS_TEXT, ""),
    ("guided_json", AS_TEXT, "json_schema", AS_TEXT, ""),
    ("guided_regex", "a+", "regex", "a+", ""),
    ("guided_choice", ["é", "b"], "choice", '["é","b"]', ""),
    ("guided_grammar", 'start: "x"', "lark", 'start: "x"', ""),
    ("guided_grammar", 'start: "::="', "lark", 'start: "::="', ""),
    ("guided_grammar", '# a ::=\n\n root ::= "x"', "ebnf", '# a ::=\n\n root ::= "x"', ""),
    ("structured_outputs", {"grammar": 'root::="x"'}, "ebnf", 'root::="x"', ".grammar"),
]


@pytest.mark.parametrize(("field", "value", "kind", "text", "below"), ASKED)
def test_each_way_to_ask(field: str, value: Any, kind: Any, text: str, below: str) -> None:
    found = form(**{field: value})
    assert found == OutputForm(Grammar(kind=kind, text=text), field + below)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None, "structured_outputs": None, "guided_json": None},
    ],
)
def test_who_asks_for_none_is_bound_to_none(fields: dict[str, Any]) -> None:
    assert form(**fields) is None


LARGE = {"type": "object", "properties": {"x" * 1000 + str(n): {} for n in range(200)}}
REFUSED = [
    ({"response_format": json_schema(schema=LARGE)}, "response_format.json_schema.schema"),
    ({"response_format": json_schema(schema="{}")}, "response_format.json_schema.schema"),
    ({"response_format": json_schema(name="")}, "response_format.json_schema.name"),
    ({"response_format": json_schema(more=1)}, "response_format.json_schema.more"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice[0]"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}}, "structured_outputs.regex"),
    ({"guided_regex": "é" * (MAX_GRAMMAR_BYTES // 2 + 1)}, "guided_regex"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"guided_decoding_backend": "x"}, "guided_decoding_backend"),
    ({"guided_regex": "a", "min_tokens": 3}, "min_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_what_cannot_be_kept_to_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadField) as caught:
        form(**fields)
    assert caught.value.param == param


def test_as_much_as_the_engine_takes_passes() -> None:
    found = form(guided_regex="é" * (MAX_GRAMMAR_BYTES // 2), response_format={"type": "text"})
    assert found is not None and found.param == "guided_regex"


@pytest.mark.parametrize("depth", range(900, 1100, 10))
def test_a_schema_of_any_depth_is_a_schema_or_a_bad_field(depth: int) -> None:
    schema = '{"items":' * depth + "{}" + "}" * depth
    body = '{"model":"m","messages":[{"role":"user","content":"x"}],"response_format":'
    body += '{"type":"json_schema","json_schema":{"name":"x","schema":' + schema + "}}}"
    try:
        request = from_openai(body.encode(), "engine")
    except BadField as error:
        assert error.param is not None
    else:
        assert request.prompt is not None and request.prompt.form is not None
        assert request.prompt.form.grammar.text == schema
