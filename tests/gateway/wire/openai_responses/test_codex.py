"""Tests that what Codex sends, as it was recorded, is taken, and the tools that agents have: those
of a namespace and those of free text, on their way to the model and back."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.fleet.upstream.body import to_chat_body
from gateway.generate_request import ChatPrompt, GenerateRequest
from gateway.generation_events import CallDelta, MeteredUsage, TextDelta
from gateway.request_errors import BadField, UnsupportedField
from gateway.wire.openai_responses.answer import begun
from gateway.wire.openai_responses.client_tools import MAX_FUNCTIONS
from gateway.wire.openai_responses.from_responses import (
    client_tools,
    hosted_tools,
    own_items,
    read_response,
    to_generate,
)
from gateway.wire.openai_responses.items import Item
from gateway.wire.openai_responses.to_responses import ResponseEncoder
from tests.gateway.wire.openai_responses.test_request import collected, events, whole
from tests.gateway.wire.recorded_clients import recorded_body
from tests.journeys.sdk.sdk_shapes import extras, said_in

HELLO = {"type": "message", "role": "user", "content": "hi"}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
TEXT = {"type": "custom", "name": "write", "description": "Write."}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "+" /[a-z]+/'}
PATCH = {**TEXT, "name": "patch", "format": LARK}
GROUPED = {"type": "namespace", "name": "files_", "description": "Files.", "tools": [LOOK, PATCH]}


def read(body: dict[str, Any]) -> GenerateRequest:
    request = read_response(json.dumps({"model": "m", "input": "x", **body}).encode())
    return to_generate(request, own_items(request, {}))


def prompt(**fields: Any) -> ChatPrompt:
    found = read(fields).prompt
    assert found is not None
    return found


def names(found: ChatPrompt) -> list[str]:
    return [] if found.tools is None else [each.name for each in found.tools.tools]


def refused(**fields: Any) -> BadField:
    with pytest.raises(BadField) as caught:
        prompt(**fields)
    return caught.value


@pytest.mark.parametrize("client", ["codex", "codex_custom"])
def test_what_it_sends_is_taken(client: str) -> None:
    sent = recorded_body(client, "/v1/responses")
    request = read(sent)
    found = request.prompt
    assert found is not None and request.stream
    roles = [message["role"] for message in found.messages]
    assert roles == ["system", "system", "user", "user", *["assistant", "tool"] * 3]
    offered = names(found)
    assert "exec_command" in offered and not {"web_search", "tool_search"} & set(offered)
    body = to_chat_body(request, "max_tokens")
    assert [tool["function"]["name"] for tool in body["tools"]] == offered
    if client == "codex":
        assert "multi_agent_v1__spawn_agent" in offered
        return
    [call] = found.messages[6]["tool_calls"]
    assert call["function"]["name"] == "apply_patch"
    assert json.loads(call["function"]["arguments"])["input"].startswith("*** Begin Patch\n")
    assert found.tools is not None
    [tool] = [each for each in found.tools.tools if each.name == "apply_patch"]
    assert tool.text_form is not None and tool.text_form.kind == "lark" and tool.strict


# ---- tools


def test_tools_of_a_namespace_are_functions_under_both_names() -> None:
    found = prompt(tools=[LOOK, GROUPED])
    assert names(found) == ["look", "files__look", "files__patch"]
    assert found.tools is not None
    params = [each.param for each in found.tools.tools]
    assert params[1:] == ["tools[1].tools[0].parameters", "tools[1].tools[1].format.definition"]
    function = found.tools.tools[2].shown["function"]
    assert function["parameters"]["required"] == ["input"]
    assert function["description"].endswith(LARK["definition"])
    added = {"type": "additional_tools", "role": "developer", "tools": [GROUPED]}
    later = prompt(input=[added, HELLO], tools=[LOOK])
    assert names(later) == names(found) and len(later.messages) == 1


def test_a_tool_of_free_text_can_be_forced_and_allowed() -> None:
    forced = prompt(tools=[LOOK, TEXT], tool_choice={"type": "custom", "name": "write"}).tools
    assert forced is not None and forced.forced == ("write",) and not forced.parallel
    assert forced.tools[1].text_form is None and not forced.tools[1].strict
    choice = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "custom", "name": "write"}],
    }
    assert names(prompt(tools=[LOOK, TEXT], tool_choice=choice)) == ["write"]


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([GROUPED, {**LOOK, "name": "files__look"}], "tools[1].name"),
        ([{**GROUPED, "name": "a b"}], "tools[0].tools[0].name"),
        ([{**GROUPED, "tools": [{"type": "web_search"}]}], "tools[0].tools[0].type"),
        ([{**TEXT, "format": {"type": "grammar", "syntax": "ebnf"}}], "tools[0].format.syntax"),
        ([{**TEXT, "defer_loading": True}], "tools[0].defer_loading"),
        ([{**GROUPED, "tools": [LOOK] * (MAX_FUNCTIONS + 1)}], "tools[0].tools"),
    ],
)
def test_tools_that_cannot_be_shown_are_named(tools: list[Any], param: str) -> None:
    assert refused(tools=tools).param == param


def test_there_are_so_many_functions_of_all_namespaces() -> None:
    many = [{**LOOK, "name": f"f{number}"} for number in range(MAX_FUNCTIONS // 2)]
    groups = [{**GROUPED, "name": name, "tools": many} for name in ("a", "b")]
    assert len(names(prompt(tools=groups))) == MAX_FUNCTIONS
    assert refused(tools=[*groups, LOOK]).param == "tools"


def test_what_the_vendors_servers_would_run_is_left_out_and_named() -> None:
    search = {"type": "web_search", "external_web_access": True, "filters": {"a": 1}}
    hosted = [search, search, {"type": "image_generation", "output_format": "png"}]
    assert names(prompt(tools=[LOOK, *hosted])) == ["look"]
    assert prompt(tools=hosted).tools is None
    assert refused(tools=hosted, tool_choice="required").param == "tool_choice"
    body = {"model": "m", "input": "x", "tools": [LOOK, *hosted], "metadata": {"a": "b"}}
    request = read_response(json.dumps(body).encode())
    assert hosted_tools(request) == ("web_search", "image_generation")
    answer = answered(request)
    left_out = {"tollgate.left_out_tools": "web_search, image_generation"}
    assert answer.metadata == {"a": "b", **left_out}
    assert [each["type"] for each in json.loads(answer.to_json())["tools"]] == ["function"]


def answered(request: Any) -> Any:
    return whole(encoder(request, stream=False).finish(MeteredUsage()))


def encoder(request: Any, *, stream: bool, **options: Any) -> ResponseEncoder:
    response = begun(
        request,
        id="resp_1",
        created_at=1,
        service_tier="default",
        status="in_progress",
        left_out=hosted_tools(request),
    )
    called = client_tools(request).called
    return ResponseEncoder(response, stream=stream, called=called, **options)


# ---- what is answered


CALLS = [
    TextDelta(index=0, text="", reasoning="Hm."),
    TextDelta(index=0, text="", calls=(CallDelta(0, "files__look", "{}"),)),
    TextDelta(index=0, text="", calls=(CallDelta(1, "files__patch", '{"input": "+'),)),
    TextDelta(index=0, text="", calls=(CallDelta(1, None, 'a\\nb"}'), CallDelta(2, "write", "??"))),
    TextDelta(index=0, text="", calls=(CallDelta(3, "look", "{}"),), finish_reason="tool_calls"),
]


def test_calls_are_named_back() -> None:
    body = {"model": "m", "input": "x", "tools": [LOOK, TEXT, GROUPED]}
    request = read_response(json.dumps(body).encode())
    at = encoder(request, stream=True, seal=lambda text: f"sealed {text}")
    stream = b"".join(at.encode([delta]) for delta in CALLS) + at.finish(MeteredUsage())
    assert [extras(each) for each in events(stream)] == [[]] * len(events(stream))
    at = encoder(request, stream=False, seal=lambda text: f"sealed {text}")
    at.encode(CALLS)
    found = whole(at.finish(MeteredUsage()))
    assert said_in(collected(stream)) == said_in(found)
    items: list[Any] = [item.to_dict() for item in found.output]
    assert items[0]["encrypted_content"] == "sealed Hm."
    shown = [
        {name: item.get(name) for name in ("type", "name", "namespace", "input", "arguments")}
        for item in items[1:]
    ]
    none = dict.fromkeys(("namespace", "input", "arguments"))
    call, text = {**none, "type": "function_call"}, {**none, "type": "custom_tool_call"}
    assert shown == [
        {**call, "name": "look", "namespace": "files_", "arguments": "{}"},
        {**text, "name": "patch", "namespace": "files_", "input": "+a\nb"},
        {**text, "name": "write", "input": "??"},
        {**call, "name": "look", "arguments": "{}"},
    ]
    kinds = [each.type for each in events(stream) if "custom" in each.type]
    told = ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
    assert kinds == told * 2


def test_what_was_called_comes_back_as_the_model_called_it() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    custom = {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": 'a\n"'}
    shell = {"type": "local_shell_call", "id": "s", "call_id": "c", "status": "completed"}
    ls = {"type": "exec", "command": ["ls", "-l"], "working_directory": "/x", "env": {}}
    items = [
        HELLO,
        {**call, "namespace": "files_"},
        {**custom, "namespace": "files_"},
        {**shell, "action": ls},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {
            "type": "custom_tool_call_output",
            "call_id": "b",
            "output": [{"type": "input_text", "text": "2"}],
        },
        {"type": "local_shell_call_output", "id": "c", "output": "3"},
    ]
    found = prompt(input=items)
    _, called, *results = found.messages
    functions = [each["function"] for each in called["tool_calls"]]
    assert [each["name"] for each in functions] == ["files__look", "files__patch", "local_shell"]
    assert json.loads(functions[1]["arguments"]) == {"input": 'a\n"'}
    ran = {"command": ["ls", "-l"], "working_directory": "/x"}
    assert json.loads(functions[2]["arguments"]) == ran
    assert [each["content"] for each in results] == ["1", "2", "3"]
    assert [each["name"] for each in results] == [each["name"] for each in functions]
    assert refused(input=items[:3]).param == "input"
    nobodys = {"type": "local_shell_call_output", "output": "3"}
    assert refused(input=[*items[:-1], nobodys]).param == "input[6].call_id"


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "compaction", "encrypted_content": "x"}, "input[0].type"),
        ({"type": "reasoning", "summary": [], "encrypted_content": "x"}, "encrypted_content"),
    ],
)
def test_what_is_sealed_is_taken_only_where_it_is_opened(item: Any, param: str) -> None:
    error = refused(input=[item, HELLO])
    assert isinstance(error, UnsupportedField) and str(error.param).endswith(param)


@pytest.mark.parametrize(
    "fields",
    [
        {"client_metadata": {"a": {"b": ["c"]}}},
        {"text": {"verbosity": "low"}},
        {"reasoning": {"summary": "detailed", "context": "all_turns"}},
        {"include": ["reasoning.encrypted_content"]},
    ],
)
def test_hints_change_nothing_that_the_model_reads(fields: dict[str, Any]) -> None:
    assert prompt(**fields) == prompt()


def test_the_answer_repeats_a_hint() -> None:
    body = {"model": "m", "input": "x", "text": {"verbosity": "high"}}
    assert answered(read_response(json.dumps(body).encode())).text.verbosity == "high"


def test_items_are_kept_as_they_came() -> None:
    """They are stored, and read again, also those of the kinds that agents send."""
    sent = recorded_body("codex_custom", "/v1/responses")
    items = own_items(read_response(json.dumps(sent).encode()), {})
    kept = msgspec.json.decode(msgspec.json.encode(items), type=tuple[Item, ...])
    assert kept == items
