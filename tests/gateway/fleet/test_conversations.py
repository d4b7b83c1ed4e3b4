"""Conversations that hypothesis makes up, before penny's own template and tokenizer: each is
answered, its stream adds up to the whole and every token counts, or refused by a field of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway.fleet.prepare_threads import PrepareThreads
from gateway.wire.surfaces import CHAT
from tests.budget import examples
from tests.gateway.fleet.both_ways import asked_both_ways
from tests.journeys.sdk.sdk_shapes import said

TEXT = st.text(st.sampled_from("aü 😀\n<|im_end|>{}\"'"), max_size=12)
PARTS = st.lists(st.builds(lambda text: {"type": "text", "text": text}, TEXT), max_size=2)
NAME = st.sampled_from(["f", "g", 'quo"ted', "über"])
SCHEMA = st.sampled_from(
    [None, {}, {"type": "object"}, {"type": "object", "properties": {"a": {"type": "integer"}}}]
)


def without_none(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


CALL = st.builds(
    lambda id_, name, arguments: {
        "id": id_,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    },
    st.sampled_from(["call_1", "abcDEF123"]),
    NAME,
    st.sampled_from(["", "{}", '{"a": [1, "ü"]}', "broken {", "[1]", "null"]),
)
MESSAGE = st.one_of(
    st.builds(
        lambda role, content, name: without_none(role=role, content=content, name=name),
        st.sampled_from(["system", "developer", "user", "assistant"]),
        TEXT | PARTS,
        st.none() | NAME,
    ),
    st.builds(
        lambda content, calls: without_none(role="assistant", content=content, tool_calls=calls),
        st.none() | TEXT,
        st.lists(CALL, min_size=1, max_size=2),
    ),
    st.builds(
        lambda content: {"role": "tool", "tool_call_id": "call_1", "content": content}, TEXT | PARTS
    ),
)
TOOL = st.builds(
    lambda name, schema: {
        "type": "function",
        "function": without_none(name=name, description="x", parameters=schema),
    },
    NAME,
    SCHEMA,
)
FIELDS = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, min_size=1, max_size=5)},
    optional={
        "tools": st.lists(TOOL, max_size=3, unique_by=lambda tool: tool["function"]["name"]),
        "tool_choice": st.sampled_from(["auto", "none", "required"]),
        "parallel_tool_calls": st.booleans(),
        "n": st.integers(1, 2),
        "max_tokens": st.integers(1, 40),
        "stop": st.sampled_from(["a", ["}", "ü"]]),
        "logprobs": st.booleans(),
        "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}]),
    },
)
ANSWER = st.lists(
    TEXT
    | st.sampled_from(
        [
            '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
            '<tool_call>{"arguments": {}, "name": "g"}',
            "<tool_call>",
            "</tool_call>\n",
        ]
    ),
    max_size=4,
).map("".join)


USED = {"stream_options": {"include_usage": True}}


def chunks(answer: bytes) -> Iterator[ChatCompletionChunk]:
    *events, done, rest = answer.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    for event in events:
        yield ChatCompletionChunk.model_validate_json(event.removeprefix("data: "))


@settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(fields=FIELDS, answer=ANSWER)
async def test_a_conversation_is_answered_or_refused_by_name(
    threads: PrepareThreads, fields: dict[str, Any], answer: str
) -> None:
    found = await asked_both_ways(CHAT, threads, fields, answer, of_stream=USED)
    if found is None:
        return
    state = ChatCompletionStreamState[Any]()
    for chunk in chunks(found.streamed):
        state.handle_chunk(chunk)
    whole = ChatCompletion.model_validate_json(found.whole)
    assert said(state.current_completion_snapshot) == said(whole)
