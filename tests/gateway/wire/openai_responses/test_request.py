"""OpenAI's Responses: what is read of a request, and answers as the official SDK reads them: its
own decoder, its own types, strictly."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response

from gateway.generate_request import ChatPrompt
from gateway.generation_events import CallDelta, MeteredUsage, TextDelta, TokenInfo, TokenTop
from gateway.request_errors import BadField, UnsupportedField
from gateway.wire.openai_responses.answer import begun
from gateway.wire.openai_responses.from_responses import own_items, read_response, to_generate
from gateway.wire.openai_responses.items import (
    CallOutput,
    FunctionCall,
    Item,
    Message,
    ReasoningItem,
    Text,
)
from gateway.wire.openai_responses.to_responses import ResponseEncoder
from tests.budget import examples
from tests.gateway.wire.fields.test_table import read_responses as read
from tests.gateway.wire.openai.test_to_chat import sdk
from tests.journeys.sdk.sdk_shapes import extras, said_in

USAGE = MeteredUsage(uncached_input=5, cache_read=16, cache_write=3, output=7, reasoning_output=2)
INFO = TokenInfo(
    "a\n", -0.5, [97, 10], [TokenTop("a\n", -0.5, [97, 10]), TokenTop("ü", -2.0, [195])]
)
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def prompt(**fields: Any) -> ChatPrompt:
    found = read(**fields).prompt
    assert found is not None
    return found


def messages(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    return prompt(input=list(items), **fields).messages


# ---- what is read


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        ({"truncation": "auto"}, "truncation"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
    ],
)
def test_what_openai_knows_and_we_do_not_is_refused_as_unsupported(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(UnsupportedField) as caught:
        read(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"input": [{"id": "msg_1"}]}, "input[0].id"),
        ({"stream_options": {}}, "stream_options"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "parameters": {"type": "array"}}]}, "tools[0].parameters"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"nobody": 1}, "nobody"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadField) as caught:
        read(**fields)
    assert caught.value.param == param


def test_a_call_that_nobody_answered_is_named() -> None:
    calls = [
        {"type": "function_call", "call_id": f"call_{name}", "name": "f", "arguments": ""}
        for name in "abc"
    ]
    answer = {"type": "function_call_output", "call_id": "call_a", "output": "x"}
    with pytest.raises(BadField) as caught:
        messages(*calls, answer, {"role": "user", "content": "so?"})
    assert caught.value.param == "input"
    assert caught.value.message == "No tool output found for function call call_b."


def test_a_turn_of_the_model_is_one_message() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": ""}
    other = {**call, "call_id": "c2", "arguments": '{"a": 1}'}
    thought = {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }
    said = {
        "type": "message",
        "role": "assistant",
        "content": [
            {"type": "output_text", "text": "one", "annotations": [], "logprobs": []},
            {"type": "output_text", "text": "two"},
        ],
    }
    answered = {
        "type": "function_call_output",
        "call_id": "c2",
        "output": [{"type": "input_text", "text": "42"}],
    }
    found = messages(
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        thought,
        said,
        call,
        other,
        answered,
        {**answered, "call_id": "c1", "output": "7"},
        {"role": "assistant", "content": "so"},
        {"role": "assistant", "content": "then"},
        instructions="be brief",
    )
    assert found == [
        {"role": "system", "content": "be brief"},
        {"role": "system", "content": "d"},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "one\ntwo",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                {
                    "id": "c2",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"a": 1}'},
                },
            ],
        },
        {"role": "tool", "content": "42", "tool_call_id": "c2", "name": "f"},
        {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "f"},
        {"role": "assistant", "content": "so"},
        {"role": "assistant", "content": "then"},
    ]


def test_a_tool_and_a_form_are_chats() -> None:
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "f"}],
    }
    found = prompt(tools=[TOOL, {**TOOL, "name": "g"}], tool_choice=choice).tools
    assert found is not None and found.forced == ("f",) and len(found.tools) == 1
    assert found.tools[0].shown == {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object"}},
    }
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    form = prompt(text={"format": schema}).form
    assert form is not None
    assert (form.grammar.kind, form.grammar.text) == ("json_schema", '{"type":"object"}')
    assert form.param == "text.format.schema"


# ---- what is answered


def encoder(*, stream: bool, **fields: Any) -> ResponseEncoder:
    request = read_response(json.dumps({"model": "penny", "input": "x", **fields}).encode())
    response = begun(
        request, id="resp_1", created_at=1_700_000_000, service_tier="default", status="in_progress"
    )
    return ResponseEncoder(response, stream=stream)


def events(answer: bytes) -> list[Any]:
    with sdk(answer, "text/event-stream") as client:
        return list(client.responses.create(model="m", input="x", stream=True))


def collected(answer: bytes) -> Response:
    with sdk(answer, "text/event-stream") as client:
        with client.responses.stream(model="m", input="x") as stream:
            return stream.get_final_response()


def whole(answer: bytes) -> Response:
    with sdk(answer, "application/json") as client:
        return client.responses.create(model="m", input="x")


DELTAS = [
    TextDelta(index=0, text="", reasoning="I "),
    TextDelta(index=0, text="Let me", reasoning="will."),
    TextDelta(index=0, text=" see.", calls=(CallDelta(0, "f", '{"a"'),), logprobs=[INFO]),
    TextDelta(index=0, text="", calls=(CallDelta(0, None, ": 1}"), CallDelta(1, "g", "{}"))),
    TextDelta(index=0, text="", finish_reason="tool_calls"),
]


def test_a_stream_is_openais_to_the_letter() -> None:
    at = encoder(stream=True)
    answer = b"".join(at.encode([delta]) for delta in DELTAS) + at.finish(USAGE)
    found = events(answer)
    assert [each.sequence_number for each in found] == list(range(len(found)))
    assert [extras(each) for each in found] == [[]] * len(found)
    named = "response.function_call_arguments.done"
    items = [each.item for each in found if each.type == "response.output_item.done"]
    called = [item.name for item in items if item.type == "function_call"]
    assert [each.name for each in found if each.type == named] == called != []
    lines = answer.decode().split("\n\n")
    assert lines.pop() == ""
    for line, event in zip(lines, found, strict=True):
        assert line.startswith(f"event: {event.type}\ndata: {{")
    assert [each.type.removeprefix("response.") for each in found] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    places = [each.output_index for each in found if hasattr(each, "output_index")]
    assert places == sorted(places) and set(places) == {0, 1, 2, 3}
    assert found[0].response.status == found[1].response.status == "in_progress"
    assert found[0].response.output == [] and found[0].response.usage is None


def test_a_stream_adds_up_to_the_whole_answer() -> None:
    stream, body = encoder(stream=True), encoder(stream=False)
    answer = b"".join(stream.encode([delta]) for delta in DELTAS) + stream.finish(USAGE)
    assert body.encode(DELTAS) == b""
    found = whole(body.finish(USAGE))
    assert extras(found) == [] and found.output_text == "Let me see."
    assert said_in(collected(answer)) == said_in(found)
    assert [item.type for item in found.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert found.status == "completed" and found.completed_at is not None
    usage = found.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (24, 7, 31)
    assert usage.input_tokens_details.cached_tokens == 16
    assert usage.input_tokens_details.cache_write_tokens == 3
    assert usage.output_tokens_details.reasoning_tokens == 2


PIECES = st.one_of(
    st.builds(lambda text: ("think", text), st.text(max_size=4)),
    st.builds(lambda text: ("say", text), st.text(max_size=4)),
    st.builds(lambda text: ("call", text), st.text(max_size=4)),
    st.builds(lambda text: ("more", text), st.text(max_size=4)),
)


@settings(max_examples=examples(60))
@given(st.lists(PIECES, max_size=12), st.sampled_from(["stop", "length", "tool_calls"]))
def test_whatever_comes_the_events_add_up(pieces: list[tuple[str, str]], reason: Any) -> None:
    deltas, calls = [], 0
    for position, (kind, text) in enumerate(pieces):
        if kind == "more" and (position == 0 or pieces[position - 1][0] not in ("call", "more")):
            kind = "say"
        if kind == "more" and calls == 0:
            continue
        match kind:
            case "think":
                deltas.append(TextDelta(index=0, text="", reasoning=text))
            case "say":
                deltas.append(TextDelta(index=0, text=text, logprobs=[INFO]))
            case "call":
                begun_call = CallDelta(calls, "f", text)
                deltas.append(TextDelta(index=0, text="", calls=(begun_call,)))
                calls += 1
            case "more" if deltas[-1].calls:
                more = CallDelta(calls - 1, None, text)
                deltas.append(TextDelta(index=0, text="", calls=(more,)))
    deltas.append(TextDelta(index=0, text="", finish_reason=reason))
    stream, body = encoder(stream=True), encoder(stream=False)
    answer = b"".join(stream.encode([delta]) for delta in deltas) + stream.finish(USAGE)
    body.encode(deltas)
    body.finish(USAGE)
    found = events(answer)
    built: dict[int, str] = {}
    for event in found:
        if event.type.endswith(".delta"):
            built[event.output_index] = built.get(event.output_index, "") + event.delta
    final = found[-1].response
    assert said_in(final) == said_in(whole(body.finish(USAGE)))
    for index, item in enumerate(final.output):
        assert text_of(item) == built.get(index, "")
    done = [event.item for event in found if event.type == "response.output_item.done"]
    assert done == final.output
    wanted = "incomplete" if reason == "length" else "completed"
    assert final.status == wanted and final.output[-1].status == wanted


def text_of(item: Any) -> str:
    return str(item.arguments if item.type == "function_call" else item.content[0].text)


def test_what_was_cut_is_incomplete() -> None:
    at = encoder(stream=True, max_output_tokens=1)
    answer = at.encode([TextDelta(index=0, text="a", finish_reason="length")]) + at.finish(USAGE)
    last = events(answer)[-1]
    assert last.type == "response.incomplete" and last.response.status == "incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert last.response.output[0].status == "incomplete" and last.response.completed_at is None


def test_nothing_said_is_an_empty_message() -> None:
    at = encoder(stream=True)
    answer = at.encode([TextDelta(index=0, text="", finish_reason="stop")]) + at.finish(USAGE)
    found = collected(answer)
    assert [item.type for item in found.output] == ["message"] and found.output_text == ""


def test_what_fails_on_its_way_says_so_in_order() -> None:
    at = encoder(stream=True)
    answer = at.encode([TextDelta(index=0, text="a")])
    answer += at.fail(status=500, message="gone")
    found = events(answer)
    assert [each.sequence_number for each in found] == list(range(len(found)))
    last = found[-1]
    assert last.type == "response.failed" and last.response.status == "failed"
    assert (last.response.error.code, last.response.error.message) == ("server_error", "gone")
    assert last.response.output[0].status == "incomplete"


def test_logprobs_are_in_the_item_and_in_its_events() -> None:
    at = encoder(stream=True, include=["message.output_text.logprobs"], top_logprobs=2)
    answer = at.encode([TextDelta(index=0, text="a\n", logprobs=[INFO])])
    answer += at.encode([TextDelta(index=0, text="", finish_reason="stop")]) + at.finish(USAGE)
    found = events(answer)
    delta = next(each for each in found if each.type == "response.output_text.delta")
    [info] = delta.logprobs
    assert (info.token, [top.token for top in info.top_logprobs]) == ("a\n", ["a\n", "ü"])
    [kept] = found[-1].response.output[0].content[0].logprobs
    assert kept.bytes == [97, 10] and kept.top_logprobs[1].bytes == [195]


def test_what_was_answered_can_be_sent_back_as_it_came() -> None:
    at = encoder(stream=False)
    at.encode(DELTAS)
    output = [item.model_dump(exclude_unset=True) for item in whole(at.finish(USAGE)).output]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "done"}
        for item in output
        if item["type"] == "function_call"
    ]
    request = read_response(json.dumps({"model": "m", "input": [*output, *results]}).encode())
    kinds: list[type[Item]] = [ReasoningItem, Message, FunctionCall, FunctionCall]
    kinds += [CallOutput] * len(results)
    items = own_items(request, {})
    assert [type(item) for item in items] == kinds
    assert [item.id for item in items[:4]] == [item["id"] for item in output]
    generate = to_generate(request, items)
    assert generate.prompt is not None
    shown, *answers = generate.prompt.messages
    assert [each["role"] for each in answers] == ["tool", "tool"]
    assert (shown["content"], shown["reasoning_content"]) == ("Let me see.", "I will.")


def test_a_reference_is_what_it_names() -> None:
    item = Message(id="msg_1", status="completed", role="user", content=(Text("hi"),))
    request = read_response(b'{"model": "m", "input": [{"id": "msg_1"}]}')
    assert own_items(request, {"msg_1": item}) == (item,)
