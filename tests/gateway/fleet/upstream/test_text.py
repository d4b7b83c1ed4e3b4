"""A surface that is not OpenAI's asks an upstream for text and gets it back: the text, the thoughts
and the calls, counted as those of a chat are."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.fleet.errors import ReplicaLost
from gateway.fleet.upstream.body import to_chat_body
from gateway.fleet.upstream.replica import UpstreamReplica
from gateway.fleet.upstream.text import UpstreamText
from gateway.generate_request import GenerateRequest
from gateway.generation_events import CallDelta, MeteredUsage, RawChunk, TextDelta
from gateway.request_errors import UnsupportedField
from gateway.wire.anthropic.from_anthropic import from_anthropic
from gateway.wire.openai.from_chat import from_openai
from tests.gateway.fleet.upstream.scripted_upstream import (
    COUNTED,
    Exchange,
    Upstream,
    good_stream,
    run,
)

Make = Callable[..., UpstreamReplica]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"name": "look", "parameters": SCHEMA}


def message(**fields: Any) -> GenerateRequest:
    said = [{"role": "user", "content": "hello"}]
    body = {"model": "big", "max_tokens": 50, "messages": said, **fields}
    return from_anthropic(json.dumps(body).encode(), "upstream")


def ours(**fields: Any) -> GenerateRequest:
    """As a chat of our own engine's, whose prompt says all that a prompt can."""
    said = [{"role": "user", "content": "hello"}]
    return from_openai(json.dumps({"model": "big", "messages": said, **fields}).encode(), "engine")


async def test_what_is_sent(upstream: Upstream, make_replica: Make) -> None:
    upstream.script = good_stream
    asked = message(
        stream=True,
        system="Be kind.",
        temperature=0.5,
        stop_sequences=["END"],
        tools=[{"name": "look", "input_schema": SCHEMA, "strict": True}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024},
        max_tokens=2000,
        messages=[
            {"role": "user", "content": "hello"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {"a": "b"}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "seen"}],
            },
        ],
    )
    await run(make_replica(max_tokens_field="max_completion_tokens"), asked)
    call = {"name": "look", "arguments": '{"a": "b"}'}
    calls = [{"id": "t1", "type": "function", "function": call}]
    assert upstream.exchanges[0].body == {
        "model": "vendor/big-32b",
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "content": "seen", "tool_call_id": "t1"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 2000,
        "temperature": 0.5,
        "stop": ["END"],
        "reasoning_effort": "low",
        "tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}],
        "parallel_tool_calls": False,
    }


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({}, {}),
        ({"n": 2, "seed": 7, "top_p": 0.5}, {"n": 2, "seed": 7, "top_p": 0.5}),
        ({"logit_bias": {"5": 1}}, {"logit_bias": {"5": 1.0}}),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
        (
            {"response_format": {"type": "json_object"}},
            {"response_format": {"type": "json_object"}},
        ),
        (
            {"structured_outputs": {"json": SCHEMA}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
                }
            },
        ),
    ],
)
def test_what_was_not_said_is_not_sent(fields: dict[str, Any], sent: dict[str, Any]) -> None:
    plain = {"model": "big", "messages": [{"role": "user", "content": "hello"}]}
    assert to_chat_body(ours(**fields), "max_tokens") == {**plain, **sent}


def test_which_call_is_forced() -> None:
    tools = [{"name": name, "input_schema": SCHEMA} for name in ("look", "wait")]

    def choice(**chosen: Any) -> Any:
        body = to_chat_body(message(tools=tools, tool_choice=chosen), "max_tokens")
        return body.get("tool_choice"), body.get("parallel_tool_calls")

    assert choice(type="auto") == (None, None)
    assert choice(type="any") == ("required", None)
    named = {"type": "function", "function": {"name": "wait"}}
    assert choice(type="tool", name="wait") == (named, None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.5}, "min_p"),
        ({"repetition_penalty": 1.5}, "repetition_penalty"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"stop_token_ids": [5]}, "stop_token_ids"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"structured_outputs": {"regex": "x"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ],
)
def test_what_it_cannot_know_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedField) as caught:
        to_chat_body(ours(**fields), "max_tokens")
    assert caught.value.param == param


def test_an_answer_is_not_begun_there() -> None:
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is"}]
    with pytest.raises(UnsupportedField) as caught:
        to_chat_body(message(messages=said), "max_tokens")
    assert caught.value.param == "messages[1].content"


# ---- what comes back


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "x", "object": "chat.completion.chunk", "choices": [choice]}


def streaming(*chunks: Any) -> Callable[[Exchange], Any]:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(*chunks, "[DONE]")
        await exchange.end_stream()

    return script


def collected(deltas: list[TextDelta]) -> dict[str, Any]:
    calls: dict[int, tuple[str, str]] = {}
    for call in (call for delta in deltas for call in delta.calls):
        name, arguments = calls.get(call.index, ("", ""))
        calls[call.index] = ((call.name or name), arguments + call.arguments)
    return {
        "text": "".join(delta.text for delta in deltas),
        "reasoning": "".join(delta.reasoning for delta in deltas),
        "calls": calls,
        "finish": [delta.finish_reason for delta in deltas if delta.finish_reason],
    }


async def deltas(replica: UpstreamReplica, request: GenerateRequest) -> list[TextDelta]:
    events = await run(replica, request)
    found = [item for event in events for item in event.items]
    assert all(isinstance(item, TextDelta) for item in found)
    return found  # type: ignore[return-value]


async def test_a_stream_is_read_and_counted(upstream: Upstream, make_replica: Make) -> None:
    upstream.script = good_stream
    events = await run(make_replica(), message(stream=True))
    found = [item for event in events for item in event.items]
    assert collected(found)["text"] == "Hello"  # type: ignore[arg-type]
    assert events[-1].usage == COUNTED


async def test_runs_of_alike_chunks_are_one_text(upstream: Upstream, make_replica: Make) -> None:
    words = [f'w{number} "ü"\\ ' for number in range(200)]
    said = [chunk(content=word) for word in words]
    data = b"".join(b"data: %b\n\n" % json.dumps(each).encode() for each in said)
    upstream.script = streaming(data, chunk("length"))
    found = await deltas(make_replica(), message(stream=True, max_tokens=1000))
    assert collected(found)["text"] == "".join(words)
    assert collected(found)["finish"] == ["length"]
    assert len(found) < len(words) // 2


ALIKE: dict[str, list[Any]] = {
    "openai": [
        {"index": 0, "id": "a", "type": "function", "function": {"name": "look", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"a": '}},
        {"index": 0, "function": {"arguments": '"b"}'}},
        {
            "index": 1,
            "id": "b",
            "type": "function",
            "function": {"name": "wait", "arguments": "{}"},
        },
    ],
    "no index": [
        {"id": "a", "function": {"name": "look", "arguments": '{"a": "b"}'}},
        {"id": "b", "function": {"name": "wait", "arguments": "{}"}},
    ],
    "neither": [
        {"id": "", "function": {"name": "look", "arguments": '{"a": '}},
        {"function": {"arguments": '"b"}'}},
        {"id": "", "function": {"name": "wait", "arguments": "{}"}},
    ],
    "a name in each": [
        {"index": 0, "function": {"name": "look", "arguments": '{"a": '}},
        {"index": 0, "function": {"name": "look", "arguments": '"b"}'}},
        {"index": 3, "function": {"name": "wait", "arguments": "{}"}},
    ],
}


@pytest.mark.parametrize("calls", ALIKE.values(), ids=ALIKE.keys())
async def test_calls_are_told_apart(upstream: Upstream, make_replica: Make, calls: Any) -> None:
    said = [chunk(tool_calls=[call]) for call in calls]
    upstream.script = streaming(chunk(reasoning_content="Hm"), *said, chunk("tool_calls"))
    found = collected(await deltas(make_replica(), message(stream=True)))
    assert found["calls"] == {0: ("look", '{"a": "b"}'), 1: ("wait", "{}")}
    assert (found["reasoning"], found["finish"]) == ("Hm", ["tool_calls"])


async def test_a_whole_answer_is_read(upstream: Upstream, make_replica: Make) -> None:
    answer = {
        "content": [
            {"type": "thinking", "thinking": [{"type": "text", "text": "Hm"}]},
            {"type": "text", "text": "Yes"},
        ],
        "tool_calls": [{"id": "a", "function": {"name": "look", "arguments": "{}"}}],
    }
    choice = {"index": 0, "message": answer, "finish_reason": "eos", "stop_reason": "END"}
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}

    async def script(exchange: Exchange) -> None:
        await exchange.answer({"choices": [choice], "usage": usage})

    upstream.script = script
    [event] = await run(make_replica(), message(stop_sequences=["END"]))
    assert event.usage == MeteredUsage(uncached_input=9, output=4)
    assert event.items == (
        TextDelta(
            index=0,
            text="Yes",
            reasoning="Hm",
            calls=(CallDelta(0, "look", "{}"),),
            finish_reason="stop",
            stop_string="END",
        ),
    )


async def test_what_is_no_answer_breaks_off(upstream: Upstream, make_replica: Make) -> None:
    upstream.script = streaming(chunk(content="a"), chunk(content=5), chunk("stop"))
    with pytest.raises(ReplicaLost):
        await run(make_replica(), message(stream=True))


def test_logprobs_are_openais() -> None:
    token = {"token": "ü", "logprob": -0.5, "bytes": None, "top_logprobs": []}
    choice = {"index": 0, "delta": {"content": "ü"}, "logprobs": {"content": [token]}}
    payload = json.dumps({"choices": [choice]}).encode()
    [delta] = UpstreamText().read((RawChunk(payload),))
    assert delta.logprobs is not None
    assert (delta.logprobs[0].token, delta.logprobs[0].bytes) == ("ü", [195, 188])
