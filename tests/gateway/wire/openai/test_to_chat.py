"""Answers as the official SDK reads them: its own decoder, its own types, strictly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import permutations
from typing import Any

import httpx2
import msgspec
import pytest
from openai import OpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from billing.events import Price, Quantities, Tier
from billing.pricing.rating import RatedUsage, rate
from gateway.generate_request import AnswerHeader
from gateway.generation_events import (
    CallDelta,
    MeteredUsage,
    RawBody,
    RawChunk,
    TextDelta,
    TokenInfo,
    TokenTop,
)
from gateway.wire.openai.chat_answer import ChoiceCollector
from gateway.wire.openai.from_chat import from_openai
from gateway.wire.openai.to_chat import ChatEncoder, to_openai
from tests.journeys.sdk.sdk_shapes import extras, said

USAGE = MeteredUsage(uncached_input=5, cache_read=16, cache_write=3, output=7, reasoning_output=2)
INFO = TokenInfo(
    "a\n", -0.5, [97, 10], [TokenTop("a\n", -0.5, [97, 10]), TokenTop("ü", -2.0, [195])]
)
HEAD = {"created": 1_700_000_000, "model": "penny", "service_tier": "default"}


def encoder(*, upstream: bool = False, served: Tier = "default", **fields: Any) -> ChatEncoder:
    body = {"model": "penny", "messages": [{"role": "user", "content": "x"}], **fields}
    request = from_openai(json.dumps(body).encode(), "upstream" if upstream else "engine")
    heading = AnswerHeader(id="chatcmpl-1", created=1_700_000_000, service_tier=served)
    return to_openai(request, heading)


def sdk(answer: bytes, media_type: str) -> OpenAI:
    """The official client, with `answer` on the wire."""

    def respond(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, content=answer, headers={"content-type": media_type})

    transport = httpx2.Client(transport=httpx2.MockTransport(respond))
    return OpenAI(
        api_key="k", base_url="http://x/v1", http_client=transport, _strict_response_validation=True
    )


def streamed(answer: bytes) -> Iterator[ChatCompletionChunk]:
    with sdk(answer, "text/event-stream") as client:
        yield from client.chat.completions.create(model="m", messages=[], stream=True)


def whole(answer: bytes) -> ChatCompletion:
    with sdk(answer, "application/json") as client:
        return client.chat.completions.create(model="m", messages=[])


def payloads(answer: bytes) -> list[Any]:
    events = answer.decode().split("\n\n")
    assert events.pop() == ""
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_the_tier_that_was_served_stands_in_the_answer_and_in_every_chunk() -> None:
    said = [TextDelta(index=0, text="a", finish_reason="stop")]
    stream = encoder(stream=True, served="flex", stream_options={"include_usage": True})
    chunks = list(streamed(stream.encode(said) + stream.finish(USAGE)))
    assert [chunk.service_tier for chunk in chunks] == ["flex"] * 4
    body = encoder(served="priority")
    assert whole(body.encode(said) + body.finish(USAGE)).service_tier == "priority"


def test_a_stream_is_openais_to_the_letter() -> None:
    chat = encoder(stream=True)
    answer = chat.encode([TextDelta(index=0, text='Hi "you"\n')])
    answer += chat.encode([TextDelta(index=0, text="!", finish_reason="stop")])
    answer += chat.finish(USAGE)
    head = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        **HEAD,
        "system_fingerprint": None,
    }

    def chunk(delta: Any, finish: str | None = None) -> Any:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**head, "choices": [choice]}

    assert payloads(answer) == [
        chunk({"role": "assistant", "content": "", "refusal": None}),
        chunk({"content": 'Hi "you"\n'}),
        chunk({"content": "!"}),
        chunk({}, "stop"),
    ]


def test_the_sdk_reads_a_stream_with_usage() -> None:
    chat = encoder(stream=True, n=2, stream_options={"include_usage": True})
    items = [
        TextDelta(index=1, text="b", logprobs=[INFO]),
        TextDelta(index=0, text="a"),
        TextDelta(index=1, text="", finish_reason="length"),
        TextDelta(index=0, text="A", finish_reason="stop"),
    ]
    answer = b"".join(chat.encode([item]) for item in items) + chat.finish(USAGE)
    *chunks, last = streamed(answer)
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks)
    text = {0: "", 1: ""}
    roles: list[int] = []
    reasons: dict[int, str] = {}
    for chunk in chunks:
        [choice] = chunk.choices
        text[choice.index] += choice.delta.content or ""
        if choice.delta.role:
            roles.append(choice.index)
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert text == {0: "aA", 1: "b"}
    assert roles == [0, 1]
    assert reasons == {0: "stop", 1: "length"}
    shown = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    [info] = shown[0].content or []
    assert [top.token for top in info.top_logprobs] == ["a\n", "ü"]
    assert last.choices == []
    assert_usage(last.usage)
    assert {chunk.id for chunk in [*chunks, last]} == {"chatcmpl-1"}


def assert_usage(usage: Any) -> None:
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (24, 7, 31)
    assert usage.prompt_tokens_details.cached_tokens == 16
    assert usage.prompt_tokens_details.cache_write_tokens == 3
    assert usage.completion_tokens_details.reasoning_tokens == 2


def test_the_sdk_reads_a_whole_answer() -> None:
    chat = encoder(n=2)
    items = [
        TextDelta(index=0, text="Hel", logprobs=[INFO]),
        TextDelta(index=1, text="", finish_reason="length"),
        TextDelta(index=0, text="lo", logprobs=[INFO], finish_reason="stop"),
    ]
    assert b"".join(chat.encode([item]) for item in items) == b""
    answer = whole(chat.finish(USAGE))
    assert (answer.id, answer.object, answer.model) == ("chatcmpl-1", "chat.completion", "penny")
    assert answer.service_tier == "default"
    first, second = answer.choices
    assert (first.message.content, first.finish_reason) == ("Hello", "stop")
    assert (first.message.role, first.message.refusal) == ("assistant", None)
    assert first.logprobs is not None and len(first.logprobs.content or []) == 2
    assert (second.message.content, second.finish_reason) == ("", "length")
    assert second.logprobs is None
    assert_usage(answer.usage)


USED = {"include_usage": True}
CALLED = [
    TextDelta(index=0, text="", reasoning="I "),
    TextDelta(index=0, text="Let me", reasoning="will.", logprobs=[INFO]),
    TextDelta(index=0, text=" see.", calls=(CallDelta(0, "f", '{"a"'),), logprobs=[INFO]),
    TextDelta(index=0, text="", calls=(CallDelta(0, None, ": 1}"), CallDelta(1, "g", "{}"))),
    TextDelta(index=0, text="", finish_reason="tool_calls"),
]
OTHERS = [
    TextDelta(index=1, text="", calls=(CallDelta(0, "f", "{}"),)),
    TextDelta(index=1, text="", logprobs=[INFO], finish_reason="tool_calls"),
    TextDelta(index=2, text="", reasoning="hm", finish_reason="stop"),
    TextDelta(index=3, text="", finish_reason="stop"),
]
"""Nothing said but a call; nothing but a thought; nothing at all."""


def test_calls_and_thoughts_add_up_to_the_same_in_a_stream_and_in_a_whole_answer() -> None:
    items = [*CALLED, *OTHERS]
    stream, body = encoder(stream=True, n=4, stream_options=USED), encoder(n=4)
    answer = b"".join(stream.encode([item]) for item in items) + stream.finish(USAGE)
    body.encode(items)
    state = ChatCompletionStreamState[Any]()
    for chunk in streamed(answer):
        state.handle_chunk(chunk)
    collected, found = state.current_completion_snapshot, whole(body.finish(USAGE))
    assert (
        extras(collected)
        == extras(found)
        == [
            ".choices[0].message.reasoning_content",
            ".choices[2].message.reasoning_content",
        ]
    )
    assert said(collected) == said(found)
    message = found.choices[0].message
    assert message.content == "Let me see." and message.tool_calls is not None
    assert [
        (call.function.name, call.function.arguments)
        for call in message.tool_calls
        if call.type == "function"
    ] == [("f", '{"a": 1}'), ("g", "{}")]
    assert len({call.id for call in message.tool_calls}) == 2
    assert message.model_extra == {"reasoning_content": "I will."}
    assert [each.message.content for each in found.choices[1:]] == [None, None, ""]
    assert len(found.choices[0].logprobs.content) == 2  # type: ignore[union-attr, arg-type]


def test_a_call_in_the_older_form_is_the_answers_own_member_whole_and_streamed() -> None:
    items = [
        TextDelta(index=0, text="So.", calls=(CallDelta(0, "f"),)),
        TextDelta(index=0, text="", calls=(CallDelta(0, arguments='{"a"'),)),
        TextDelta(index=0, text="", calls=(CallDelta(0, arguments=": 1}"),)),
        TextDelta(index=0, text="", finish_reason="tool_calls"),
    ]
    older: Any = {"functions": [{"name": "f"}]}
    body, stream = encoder(**older), encoder(**older, stream=True)
    body.encode(items)
    [choice] = whole(body.finish(USAGE)).choices
    called = choice.message.function_call
    assert called is not None and choice.message.tool_calls is None
    assert (called.name, called.arguments) == ("f", '{"a": 1}')
    assert (choice.finish_reason, choice.message.content) == ("function_call", "So.")

    chunks = list(streamed(stream.encode(items) + stream.finish(USAGE)))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [delta.function_call for delta in deltas if delta.function_call is not None]
    assert [call.name for call in calls] == ["f", None, None]
    assert "".join(call.arguments or "" for call in calls) == '{"a": 1}'
    assert all(delta.tool_calls is None for delta in deltas)
    assert chunks[-1].choices[0].finish_reason == "function_call"


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_sdk_adds_choices_up_in_whatever_order_they_begin(order: tuple[int, ...]) -> None:
    """Its accumulator knows no choice that comes before those of lower numbers."""
    firsts = {
        0: TextDelta(index=0, text="", calls=(CallDelta(0, "f", "{}"),)),
        1: TextDelta(index=1, text="", finish_reason="stop"),
        2: TextDelta(index=2, text="two"),
    }
    items = [firsts[index] for index in order]
    items += [TextDelta(index=index, text="", finish_reason="stop") for index in (2, 0)]
    chat, body = encoder(stream=True, n=3, stream_options=USED), encoder(n=3)
    answer = b"".join(chat.encode([item]) for item in items) + chat.finish(USAGE)
    state = ChatCompletionStreamState[Any]()
    for chunk in streamed(answer):
        state.handle_chunk(chunk)
    body.encode(items)
    assert said(state.current_completion_snapshot) == said(whole(body.finish(USAGE)))


def test_a_call_begins_with_its_name_and_id() -> None:
    chat = encoder(stream=True)
    answer = b"".join(chat.encode([item]) for item in CALLED) + chat.finish(USAGE)
    deltas = [payload["choices"][0]["delta"] for payload in payloads(answer)]
    calls = [delta.pop("tool_calls") for delta in deltas if "tool_calls" in delta]
    for [call] in calls:
        assert call.pop("id", "call_").startswith("call_")
    assert [delta for delta in deltas if delta] == [
        {"role": "assistant", "content": None, "refusal": None},
        {"reasoning_content": "I "},
        {"reasoning_content": "will."},
        {"content": "Let me"},
        {"content": " see."},
    ]
    assert calls == [
        [{"index": 0, "type": "function", "function": {"name": "f", "arguments": '{"a"'}}],
        [{"index": 0, "function": {"arguments": ": 1}"}}],
        [{"index": 1, "type": "function", "function": {"name": "g", "arguments": "{}"}}],
    ]


def test_a_message_that_calls_can_be_sent_back_as_it_came() -> None:
    chat = encoder()
    chat.encode(CALLED)
    message = whole(chat.finish(USAGE)).choices[0].message.model_dump(exclude_unset=True)
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "x"}
        for call in message["tool_calls"]
    ]
    body = {"model": "m", "messages": [message, *results]}
    request = from_openai(json.dumps(body).encode(), "engine")
    assert request.prompt is not None
    shown = request.prompt.messages[0]
    assert [call["function"]["arguments"] for call in shown["tool_calls"]] == ['{"a": 1}', "{}"]
    assert shown["reasoning_content"] == "I will."


def test_a_message_can_be_sent_back_as_it_came() -> None:
    chat = encoder()
    chat.encode([TextDelta(index=0, text="Hello", finish_reason="stop")])
    message = whole(chat.finish(USAGE)).choices[0].message
    sent_back = message.model_dump(exclude_unset=True)
    body = {"model": "m", "messages": [sent_back]}
    request = from_openai(json.dumps(body).encode(), "engine")
    assert request.prompt is not None
    assert request.prompt.messages == [{"role": "assistant", "content": "Hello"}]


THEIRS = {
    "id": "chatcmpl-theirs",
    "object": "chat.completion.chunk",
    "created": 7,
    "model": "penny",
    "system_fingerprint": "fp_1",
    "choices": [{"index": 0, "delta": {"content": "x\ny"}, "finish_reason": None}],
}


@pytest.mark.parametrize("indent", [None, 1])
def test_an_upstreams_stream_gets_our_usage_under_its_own_id(indent: int | None) -> None:
    chat = encoder(upstream=True, stream=True, stream_options={"include_usage": True})
    chunk = RawChunk(json.dumps(THEIRS, indent=indent).encode())
    first, second, last = streamed(chat.encode([chunk, chunk]) + chat.finish(USAGE))
    assert first.choices[0].delta.content == second.choices[0].delta.content == "x\ny"
    assert "usage" in first.model_fields_set and first.usage is None
    assert (last.id, last.created, last.model) == ("chatcmpl-theirs", 7, "penny")
    assert (last.system_fingerprint, last.service_tier) == ("fp_1", None)
    assert_usage(last.usage)


def test_who_did_not_ask_sees_no_usage() -> None:
    chat = encoder(upstream=True, stream=True)
    answer = chat.encode([RawChunk(json.dumps(THEIRS).encode())]) + chat.finish(USAGE)
    assert payloads(answer) == [THEIRS]


@pytest.mark.parametrize("chunk", [None, {**THEIRS, "id": 5}, {"choices": []}])
def test_a_usage_chunk_without_an_id_to_borrow(chunk: Any) -> None:
    chat = encoder(upstream=True, stream=True, stream_options={"include_usage": True})
    items = [] if chunk is None else [RawChunk(json.dumps(chunk).encode())]
    *_, last = payloads(chat.encode(items) + chat.finish(USAGE))
    assert (last["id"], last["created"]) == ("chatcmpl-1", 1_700_000_000)


def test_an_upstreams_whole_answer_gets_our_usage() -> None:
    chat = encoder(upstream=True)
    message = {"role": "assistant", "content": "x"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    body = {**THEIRS, "object": "chat.completion", "choices": [choice]}
    assert chat.encode([RawBody(json.dumps(body).encode())]) == b""
    answer = whole(chat.finish(USAGE))
    assert (answer.id, answer.choices[0].message.content) == ("chatcmpl-theirs", "x")
    assert_usage(answer.usage)


RATED = rate(
    Quantities(uncached_input=2, cache_read=3, output=5, reasoning_output=1),
    {"uncached_input": Price("in", 150_000), "output": Price("out", 600_000)},
)


@pytest.mark.parametrize("upstream", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_cost_is_exact_and_said_to_who_asked(stream: bool, upstream: bool) -> None:
    fields = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}

    def usage(cost: RatedUsage | None) -> dict[str, Any]:
        answer = encoder(upstream=upstream, **fields).finish(USAGE, cost)
        found: Any = payloads(answer)[-1] if stream else json.loads(answer.replace(b"{,", b"{"))
        return dict(found["usage"])

    assert "cost" not in usage(None)
    assert usage(RATED)["cost"] == {
        "amount": "0.0000039",
        "currency": "USD",
        "components": {
            "uncached_input": part(2, "0.0000003", "in"),
            "output": part(5, "0.000003", "out"),
            "reasoning_output": part(1, "0.0000006", "out"),
        },
        "unpriced": ["cache_read"],
    }


def part(quantity: int, amount: str, price_id: str) -> dict[str, Any]:
    return {"quantity": quantity, "unit": "tokens", "amount": amount, "price_id": price_id}


def test_a_message_has_all_that_vllms_has_in_its_dialect() -> None:
    call = CallDelta(0, "f", "{}")
    for calls_function in (False, True):
        for delta in (
            TextDelta(index=0, text="", calls=(call,)),
            TextDelta(index=0, text="a", reasoning="b"),
            TextDelta(index=0, text="a"),
        ):
            told = []
            for speaks_vllm in (False, True):
                choice = ChoiceCollector(speaks_vllm=speaks_vllm, calls_function=calls_function)
                choice.add(delta)
                told.append(msgspec.to_builtins(choice.choice(0).message))
            openais, vllms = told
            for call_told in (*openais.get("tool_calls", ()), *vllms["tool_calls"]):
                del call_told["id"]
            nothing = {"reasoning_content": None, "function_call": None, "tool_calls": []}
            wanted = {**nothing, "annotations": None, "audio": None, **openais}
            assert vllms == {**wanted, "content": openais["content"] or ""}


def test_usage_has_no_details_of_nothing_in_vllms_dialect() -> None:
    said = [TextDelta(index=0, text="a", finish_reason="stop")]
    nothing = MeteredUsage(uncached_input=3, output=1)
    something = MeteredUsage(uncached_input=3, cache_read=2, output=2, reasoning_output=1)
    heading = AnswerHeader(id="chatcmpl-1", created=1)
    for stream in (False, True):
        fields = {"stream": stream, "stream_options": {"include_usage": True} if stream else None}
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
        request = from_openai(json.dumps(body).encode(), "vllm")
        for usage, shown in ((nothing, (None, None)), (something, (2, 1))):
            chat = to_openai(request, heading)
            answer = chat.encode(said) + chat.finish(usage)
            told = payloads(answer)[-1]["usage"] if stream else json.loads(answer)["usage"]
            details = told["prompt_tokens_details"], told["completion_tokens_details"]
            counts = (
                (details[0] and details[0]["cached_tokens"]),
                (details[1] and details[1]["reasoning_tokens"]),
            )
            assert counts == shown and told["prompt_tokens"] == usage.prompt_tokens
