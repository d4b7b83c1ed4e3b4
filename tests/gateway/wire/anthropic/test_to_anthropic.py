"""Answers as Anthropic's official SDK reads them: its own decoder, its own types, strictly; and
what its accumulator makes of a stream is the whole answer."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from anthropic import Anthropic
from anthropic.types import Message
from hypothesis import given
from hypothesis import strategies as st

from billing.events import Price, Quantities, Tier
from billing.pricing.rating import rate
from gateway.generate_request import AnswerHeader, GenerateRequest
from gateway.generation_events import CallDelta, MeteredUsage, TextDelta
from gateway.wire.anthropic.from_anthropic import from_anthropic
from gateway.wire.anthropic.partial_json import to_object
from gateway.wire.anthropic.to_anthropic import to_anthropic, to_opening
from tests.journeys.sdk.sdk_shapes import extras, said_by

USAGE = MeteredUsage(
    uncached_input=5, cache_read=16, cache_write=3, cache_write_1h=4, output=70, reasoning_output=2
)


def asked(**fields: Any) -> GenerateRequest:
    body = {"model": "penny", "max_tokens": 70, "messages": [{"role": "user", "content": "x"}]}
    return from_anthropic(json.dumps({**body, **fields}).encode(), "engine")


def answer(
    items: list[TextDelta], *, stream: bool, served: Tier = "default", cost: Any = None
) -> bytes:
    request, heading = (
        asked(stream=stream),
        AnswerHeader(id="msg_1", created=1, service_tier=served),
    )
    encoder, opening = to_anthropic(request, heading), to_opening(request, heading)
    begun = b"" if opening is None else opening(USAGE)
    said = b"".join(encoder.encode([item]) for item in items)
    return begun + said + encoder.finish(USAGE, cost)


def sdk(answer: bytes, media_type: str) -> Anthropic:
    def respond(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, content=answer, headers={"content-type": media_type})

    transport = httpx2.Client(transport=httpx2.MockTransport(respond))
    return Anthropic(
        api_key="k", base_url="http://x", http_client=transport, _strict_response_validation=True
    )


def read_whole(answer: bytes) -> Message:
    with sdk(answer, "application/json") as client:
        return client.messages.create(model="m", messages=[], max_tokens=1)


def read_stream(answer: bytes) -> Message:
    with sdk(answer, "text/event-stream") as client:
        with client.messages.stream(model="m", messages=[], max_tokens=1) as stream:
            return stream.get_final_message()


def whole(items: list[TextDelta], **options: Any) -> Message:
    return read_whole(answer(items, stream=False, **options))


def streamed(items: list[TextDelta], **options: Any) -> Message:
    return read_stream(answer(items, stream=True, **options))


def events(items: list[TextDelta]) -> list[Any]:
    found = []
    for written in answer(items, stream=True).decode().split("\n\n")[:-1]:
        name, data = written.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


THOUGHT_AND_CALLED = [
    TextDelta(index=0, text="", reasoning="Hm"),
    TextDelta(index=0, text="I lo", reasoning="m."),
    TextDelta(index=0, text="ok", calls=(CallDelta(0, "look", '{"at": '),)),
    TextDelta(index=0, text="", calls=(CallDelta(0, None, '"ü"}'), CallDelta(1, "wait", "{}"))),
    TextDelta(index=0, text="", finish_reason="tool_calls"),
]


def test_a_stream_is_anthropics_to_the_letter() -> None:
    start, ping, *rest, delta, stop = events(THOUGHT_AND_CALLED)
    usage = {
        "input_tokens": 5,
        "cache_creation_input_tokens": 7,
        "cache_read_input_tokens": 16,
        "output_tokens": 70,
        "output_tokens_details": {"thinking_tokens": 2},
    }
    created = {"ephemeral_1h_input_tokens": 4, "ephemeral_5m_input_tokens": 3}
    assert start == {
        "type": "message_start",
        "message": {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": "penny",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**usage, "cache_creation": created, "service_tier": "standard"},
        },
    }
    assert ping == {"type": "ping"}
    shown = [(each["type"].removeprefix("content_block_"), each["index"]) for each in rest]
    assert [index for _, index in shown] == sorted(index for _, index in shown)
    steps = ["start", "delta", "delta", "delta", "stop", "start", "delta", "delta", "stop"]
    steps += ["start", "delta", "delta", "stop", "start", "delta", "stop"]
    assert [step for step, _ in shown] == steps
    kinds = [each["delta"]["type"] for each in rest if "delta" in each]
    assert kinds == [
        *("thinking_delta", "thinking_delta", "signature_delta"),
        *("text_delta", "text_delta", *["input_json_delta"] * 3),
    ]
    begun = [each["content_block"] for each in rest if "content_block" in each]
    assert begun[:2] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
    ]
    assert [each["input"] for each in begun[2:]] == [{}, {}]
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"] == usage
    assert stop == {"type": "message_stop"}


def test_whole_and_streamed_are_the_same_message() -> None:
    message = whole(THOUGHT_AND_CALLED)
    assert extras(message) == []
    thinking, text, look, wait = message.content
    assert thinking.type == "thinking" and thinking.thinking == "Hmm." and thinking.signature
    assert text.type == "text" and text.text == "I look"
    assert look.type == "tool_use" and (look.name, look.input) == ("look", {"at": "ü"})
    assert wait.type == "tool_use" and (wait.name, wait.input) == ("wait", {})
    assert look.id.startswith("toolu_") and look.id != wait.id
    assert said_by(streamed(THOUGHT_AND_CALLED)) == said_by(message)


@pytest.mark.parametrize(
    ("last", "output", "reason", "stop"),
    [
        ({"finish_reason": "stop"}, 3, "end_turn", None),
        ({"finish_reason": "stop", "stop_string": "END"}, 3, "stop_sequence", "END"),
        ({"finish_reason": "length"}, 70, "max_tokens", None),
        ({"finish_reason": "length"}, 69, "model_context_window_exceeded", None),
        ({"finish_reason": "content_filter"}, 3, "refusal", None),
        ({"finish_reason": "tool_calls"}, 3, "tool_use", None),
        ({"finish_reason": "stop", "calls": (CallDelta(0, "f", "{}"),)}, 3, "tool_use", None),
    ],
)
def test_why_it_stopped(last: Any, output: int, reason: str, stop: str | None) -> None:
    for stream in (True, False):
        encoder = to_anthropic(asked(stream=stream), AnswerHeader(id="msg_1", created=1))
        said = encoder.encode([TextDelta(index=0, text="a", **last)])
        said += encoder.finish(MeteredUsage(uncached_input=1, output=output))
        end = json.dumps({"stop_reason": reason, "stop_sequence": stop}, separators=(",", ":"))
        assert end[1:-1].encode() in said


def test_an_answer_of_nothing_has_no_block() -> None:
    nothing = [TextDelta(index=0, text="", finish_reason="stop")]
    assert whole(nothing).content == []
    assert said_by(streamed(nothing)) == said_by(whole(nothing))


def test_the_tier_and_the_cost_stand_in_usage() -> None:
    done = [TextDelta(index=0, text="a", finish_reason="stop")]
    assert whole(done, served="priority").usage.service_tier == "priority"
    assert streamed(done, served="flex").usage.service_tier == "batch"
    cost = rate(Quantities(output=7), {"output": Price("o", 600_000)})
    body = json.loads(answer(done, stream=False, cost=cost))
    assert body["usage"]["cost"]["amount"] == "0.0000042"
    assert b'"cost":{"amount":"0.0000042"' in answer(done, stream=True, cost=cost)


ARGUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.floats(-9, 9) | st.text('a"\\ü{}[],: 1'),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text('a"}'), inner, max_size=2),
    max_leaves=6,
)


@given(st.dictionaries(st.text('ab"\\'), ARGUMENTS, max_size=3), st.data())
def test_arguments_that_broke_off_are_what_the_sdk_makes_of_them(
    arguments: dict[str, Any], data: st.DataObject
) -> None:
    text = json.dumps(arguments, ensure_ascii=data.draw(st.booleans()))
    cut = text[: data.draw(st.integers(0, len(text)))]
    items = [TextDelta(index=0, text="", calls=(CallDelta(0, "f", cut),), finish_reason="length")]
    found = json.loads(to_object(cut))
    if cut == text:
        assert found == arguments
    [call] = streamed(items).content
    assert call.type == "tool_use" and call.input == found


@pytest.mark.parametrize(
    "text", ["[1]", "nonsense", '"text"', "}", '{"a" "b"', "[" * 5000, "1e999"]
)
def test_arguments_that_are_no_object_are_shown_in_one(text: str) -> None:
    found = json.loads(to_object(text))
    assert isinstance(found, dict)
    assert found in ({"arguments": text}, {})
