"""Tools of a request: which the model is shown, which it must call, and the calls of earlier
answers as chat templates expect them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.generate_request import ChatPrompt, GenerateRequest, Tool, ToolUse
from gateway.request_errors import BadField
from gateway.wire.openai.from_chat import from_openai

PARAMETERS = {"type": "object", "properties": {"b": {}, "a": {"type": "integer"}}}
F = {"type": "function", "function": {"name": "f", "description": "does", "parameters": PARAMETERS}}
G = {"type": "function", "function": {"name": "g", "strict": True}}
TOOL_F = Tool(name="f", shown=F, parameters=PARAMETERS, param="tools[0].function.parameters")
TOOL_G = Tool(
    name="g",
    shown={"type": "function", "function": {"name": "g"}},
    strict=True,
    param="tools[1].function.parameters",
)


def engine(**fields: Any) -> GenerateRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return from_openai(json.dumps(body).encode(), "engine")


def prompt(**fields: Any) -> ChatPrompt:
    found = engine(**fields).prompt
    assert found is not None
    return found


def use(**fields: Any) -> ToolUse | None:
    return prompt(tools=[F, G], **fields).tools


def named(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name}} for name in names]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named(*names)}}


CHOICES: list[tuple[Any, tuple[Tool, ...], tuple[str, ...], bool]] = [
    (None, (TOOL_F, TOOL_G), (), True),
    ("auto", (TOOL_F, TOOL_G), (), True),
    ("required", (TOOL_F, TOOL_G), ("f", "g"), True),
    (named("g")[0], (TOOL_F, TOOL_G), ("g",), False),
    (allowed("auto", "g"), (TOOL_G,), (), True),
    (allowed("required", "g", "f"), (TOOL_F, TOOL_G), ("f", "g"), True),
]


@pytest.mark.parametrize(("choice", "tools", "forced", "parallel"), CHOICES)
def test_which_are_shown_and_which_must_be_called(
    choice: Any, tools: tuple[Tool, ...], forced: tuple[str, ...], parallel: bool
) -> None:
    found = use(tool_choice=choice)
    assert found is not None and found.num_chars > 0
    assert (found.tools, found.forced, found.parallel) == (tools, forced, parallel)
    one = use(tool_choice=choice, parallel_tool_calls=False)
    assert one is not None and not one.parallel


def test_none_is_shown_where_none_may_be_called() -> None:
    assert use(tool_choice="none") is None
    assert prompt(tools=[]) == prompt(tools=None, tool_choice="auto") == prompt()


def test_whoever_brings_tools_waits_with_the_agents() -> None:
    assert engine(tools=[F]).has_tools and engine(tools=[F], tool_choice="none").has_tools
    assert not engine(tools=[]).has_tools


def test_who_is_kept_to_a_schema() -> None:
    def kept(**fields: Any) -> bool:
        found = prompt(**fields).tools
        assert found is not None
        return found.is_kept_to

    assert not kept(tools=[F])
    assert kept(tools=[F], tool_choice="required") and kept(tools=[F, G])


def schema(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


REFUSED = [
    ({"tools": [F, F]}, "tools[1].function.name"),
    ({"tools": [{}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": [schema(type="string")]}, "tools[0].function.parameters"),
    ({"tools": [F] * 129}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [F], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [F], "tool_choice": named("g")[0]}, "tool_choice.function.name"),
    (
        {"tools": [F], "tool_choice": allowed("auto", "f", "g")},
        "tool_choice.allowed_tools.tools[1].function.name",
    ),
    ({"tools": [F], "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": named("f")[0]}, "tool_choice"),
    ({"tools": [F], "tool_choice": "required", "min_tokens": 1}, "min_tokens"),
    ({"tools": [G], "min_tokens": 1}, "min_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_what_cannot_be_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadField) as caught:
        engine(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("depth", range(900, 1100, 10))
def test_a_schema_of_any_depth_is_a_schema_or_a_bad_field(depth: int) -> None:
    deep = '{"items":' * depth + "{}" + "}" * depth
    body = '{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[{"type":"function",'
    body += '"function":{"name":"f","parameters":' + deep + "}}]}"
    try:
        request = from_openai(body.encode(), "engine")
    except BadField as error:
        assert error.param is not None
    else:
        assert request.prompt is not None and request.prompt.tools is not None


# ---- the calls of earlier answers


def call(arguments: str, **fields: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"id": "call_1", "type": "function", "function": function, **fields}


def test_a_loop_of_calls_and_results_is_shown_to_the_template() -> None:
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "tool_calls": [call('{"b": 1, "a": [2.0]}')]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "r"}]},
        {
            "role": "assistant",
            "content": "Well.",
            "reasoning_content": "hm",
            "parsed": None,
            "tool_calls": [call("", index=0), call("{broken")],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "s", "name": "f"},
    ]
    called = {"id": "call_1", "type": "function"}
    found = prompt(messages=messages)
    assert found.messages[1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {**called, "function": {"name": "f", "arguments": '{"b": 1, "a": [2.0]}'}}
            ],
        },
        {"role": "tool", "content": "r", "tool_call_id": "call_1"},
        {
            "role": "assistant",
            "content": "Well.",
            "tool_calls": [
                {**called, "function": {"name": "f", "arguments": "{}"}},
                {**called, "function": {"name": "f", "arguments": "{broken"}},
            ],
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "s", "name": "f", "tool_call_id": "call_1"},
    ]
    assert found.num_other_chars == len('{"b": 1, "a": [2.0]}{broken') + 3


BROKEN = [
    ([], "messages[0].tool_calls"),
    ([call("{}")] * 129, "messages[0].tool_calls"),
    ([call("{}", type="custom")], "messages[0].tool_calls[0].type"),
    ([call("{}", x=1)], "messages[0].tool_calls[0].x"),
    ([{**call("{}"), "function": {"name": "f"}}], "messages[0].tool_calls[0].function.arguments"),
    ([{**call("{}"), "id": ""}], "messages[0].tool_calls[0].id"),
]


@pytest.mark.parametrize(("calls", "param"), BROKEN)
def test_calls_that_are_none_are_named(calls: list[Any], param: str) -> None:
    with pytest.raises(BadField) as caught:
        engine(messages=[{"role": "assistant", "content": "", "tool_calls": calls}])
    assert caught.value.param == param
