"""docs/fields.md is true of what stands inside other fields, too: two values of one that is
honoured make two requests, two of one that is ignored the same, and one that is refused is refused
by its name."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest

from gateway.generate_request import GenerateRequest
from gateway.request_errors import BadField
from gateway.wire.fields.surfaces import CHAT
from gateway.wire.fields.table import Row, rows
from gateway.wire.openai.from_chat import from_openai

CALLED = {"name": "f", "arguments": "{}"}
CALL = {"id": "1", "type": "function", "function": CALLED}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
SCHEMA = {"name": "x", "schema": {}}
USER = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}
ASSISTANT = {"messages": [{"role": "assistant", "content": "x", "tool_calls": [CALL]}]}
CALLING = {"role": "assistant", "content": "x", "tool_calls": [{**CALL, "id": id_} for id_ in "ab"]}
TOOL = {"messages": [CALLING, {"role": "tool", "content": "x", "tool_call_id": "a"}]}
OFFERED = {"tools": TOOLS}
NAMED = OFFERED | {"tool_choice": {"type": "function", "function": {"name": "f"}}}
ALLOWING = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}
ALLOWED = OFFERED | {"tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWING}}
FORMED = {"response_format": {"type": "json_schema", "json_schema": SCHEMA}}
CALLED_ONCE = {"messages": [{"role": "assistant", "content": None, "function_call": CALLED}]}
FUNCTIONS = {"functions": [{"name": "f"}, {"name": "g"}]}
AN_OBJECT = {"response_format": {"type": "json_object"}}
COUNTED = {"stream": True, "stream_options": {"include_usage": True}}
LEASED = {"type": "ephemeral"}

TWO_VALUES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "messages[].role": (USER, "user", "system"),
    "messages[].content": (USER, "x", "y"),
    "messages[].content[].text": (USER, "x", "y"),
    "messages[].content[].cache_control": (USER, None, LEASED),
    "messages[].content[].cache_control.ttl": (USER, "5m", "1h"),
    "messages[].name": (USER, "a", "b"),
    "messages[].cache_control": (USER, None, LEASED),
    "messages[].cache_control.ttl": (USER, "5m", "1h"),
    "messages[].annotations": (ASSISTANT, None, []),
    "messages[].tool_calls": (ASSISTANT, [CALL], [CALL, CALL]),
    "messages[].tool_calls[].id": (ASSISTANT, "a", "b"),
    "messages[].tool_calls[].function": (
        ASSISTANT,
        {"name": "f", "arguments": "1"},
        CALL["function"],
    ),
    "messages[].tool_calls[].function.name": (ASSISTANT, "f", "g"),
    "messages[].tool_calls[].function.arguments": (ASSISTANT, "{}", "1"),
    "messages[].tool_calls[].function.parsed_arguments": (ASSISTANT, {}, {"a": 1}),
    "messages[].tool_calls[].index": (ASSISTANT, 0, 1),
    "messages[].reasoning_content": (ASSISTANT, "a", "b"),
    "messages[].reasoning": (ASSISTANT, "a", "b"),
    "messages[].parsed": (ASSISTANT, {}, {"a": 1}),
    "messages[].provider_specific_fields": (ASSISTANT, None, {"refusal": None}),
    "messages[].tool_call_id": (TOOL, "a", "b"),
    "stream_options.include_usage": ({"stream": True}, False, True),
    "stream_options.continuous_usage_stats": (COUNTED, False, True),
    "reasoning.effort": ({}, "low", "high"),
    "response_format.type": ({}, "text", "json_object"),
    "response_format.schema": (AN_OBJECT, {}, {"type": "object"}),
    "response_format.json_schema": (FORMED, SCHEMA, {"name": "x", "schema": {"type": "null"}}),
    "response_format.json_schema.name": (FORMED, "a", "b"),
    "response_format.json_schema.schema": (FORMED, {}, {"type": "null"}),
    "response_format.json_schema.description": (FORMED, "a", "b"),
    "response_format.json_schema.strict": (FORMED, True, False),
    "tools[].function": (OFFERED, {"name": "a"}, {"name": "b"}),
    "tools[].function.name": (OFFERED, "a", "b"),
    "tools[].function.description": (OFFERED, "a", "b"),
    "tools[].function.parameters": (OFFERED, {}, {"type": "object"}),
    "tools[].function.strict": (OFFERED, True, False),
    "tools[].cache_control": (OFFERED, None, LEASED),
    "tools[].cache_control.ttl": (OFFERED, "5m", "1h"),
    "messages[].function_call": (CALLED_ONCE, {"name": "f", "arguments": "1"}, CALLED),
    "messages[].function_call.name": (CALLED_ONCE, "f", "g"),
    "messages[].function_call.arguments": (CALLED_ONCE, "{}", "1"),
    "messages[].function_call.parsed_arguments": (CALLED_ONCE, {}, {"a": 1}),
    "functions[].name": (FUNCTIONS, "a", "b"),
    "functions[].description": (FUNCTIONS, "a", "b"),
    "functions[].parameters": (FUNCTIONS, {}, {"type": "object"}),
    "functions[].strict": (FUNCTIONS, True, False),
    "function_call.name": (FUNCTIONS | {"function_call": {"name": "f"}}, "f", "g"),
    "tool_choice.function": (NAMED, {"name": "f"}, {"name": "g"}),
    "tool_choice.function.name": (NAMED, "f", "g"),
    "tool_choice.allowed_tools": (ALLOWED, ALLOWING, ALLOWING | {"mode": "required"}),
    "tool_choice.allowed_tools.mode": (ALLOWED, "auto", "required"),
    "tool_choice.allowed_tools.tools": (ALLOWED, TOOLS, TOOLS[:1]),
    "tool_choice.allowed_tools.tools[].function": (ALLOWED, {"name": "f"}, {"name": "g"}),
    "tool_choice.allowed_tools.tools[].function.name": (ALLOWED, "f", "g"),
    "structured_outputs.json": ({}, {}, {"type": "null"}),
    "structured_outputs.regex": ({}, "a", "b"),
    "structured_outputs.choice": ({}, ["a"], ["b"]),
    "structured_outputs.grammar": ({}, 'start: "a"', 'start: "b"'),
}
ONE_VALUE = {
    "messages[].content[].type",
    "messages[].content[].cache_control.type",
    "messages[].cache_control.type",
    "messages[].tool_calls[].type",
    "stream_options.include_obfuscation",
    "structured_outputs.json_object",
    "tools[].type",
    "tools[].cache_control.type",
    "tool_choice.type",
    "tool_choice.allowed_tools.tools[].type",
}
"""Fields that are taken, or that go with the fields around them."""
NESTED = {row.path: row for row in rows(CHAT) if "." in row.path}
REFUSED = [row for row in NESTED.values() if row.treatment == "refused"]


def put(fields: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """`fields` with `value` at `path`, in the last element of each array on the way."""
    body = copy.deepcopy(fields)
    at: Any = body
    *steps, last = path.split(".")
    for step in steps:
        name = step.removesuffix("[]")
        new: Any = [{}] if step.endswith("[]") else {}
        if "cache_control" in name:
            new = dict(LEASED)
        at = at.setdefault(name, new)
        at = at[-1] if step.endswith("[]") else at
    at[last] = value
    return body


def read(fields: dict[str, Any]) -> GenerateRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    body["messages"] = answered(body["messages"])
    return from_openai(json.dumps(body).encode(), "engine")


def answered(messages: Any) -> Any:
    """With a result of each call: none is taken without."""
    calls = [call for each in messages for call in each.get("tool_calls") or () if call]
    missing = {call["id"] for call in calls} - {each.get("tool_call_id") for each in messages}
    return messages + [
        {"role": "tool", "tool_call_id": one, "content": "x"} for one in sorted(missing)
    ]


def test_every_nested_field_is_tried_here() -> None:
    taken = {path for path, row in NESTED.items() if row.treatment != "refused"}
    assert taken == TWO_VALUES.keys() | ONE_VALUE


@pytest.mark.parametrize("path", TWO_VALUES)
def test_what_is_honoured_matters_and_what_is_ignored_does_not(path: str) -> None:
    fields, one, other = TWO_VALUES[path]
    same = read(put(fields, path, one)) == read(put(fields, path, other))
    assert same == (NESTED[path].treatment == "ignored")


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.path)
def test_what_is_refused_is_refused_by_its_name(row: Row) -> None:
    fields = ASSISTANT if row.only else USER
    for value in ({}, "x", True):
        with pytest.raises(BadField) as caught:
            read(put(fields, row.path, value))
        assert re.sub(r"\[\d+\]", "[]", caught.value.param or "") == row.path
