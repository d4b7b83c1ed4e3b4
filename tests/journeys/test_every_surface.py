"""Every surface before the model itself, whose answers are kept to grammars: what hypothesis makes
up is answered or refused and billed once, and the official SDKs' accumulators make of each stream
what the whole answer says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.chaos.test_kills import balance
from tests.gateway.fuzz.asking import Asker
from tests.journeys.sdk.sdk_shapes import extras, said_by, said_in
from tests.stack import Stack

pytestmark = pytest.mark.slow

EXAMPLES = {"chat": 24, "responses": 20, "messages": 16, "completions": 24}
"""How many examples each surface gets; without a model no output follows a form or a forced call.
"""
FORCED = {"tool_choice": "required", "parallel_tool_calls": False}
PARAMETERS = {
    "type": "object",
    "properties": {"place": {"enum": ["here", "ü"]}, "times": {"type": "integer", "maximum": 9}},
    "required": ["place", "times"],
    "additionalProperties": False,
}
FORM = {**PARAMETERS, "properties": {**PARAMETERS["properties"], "times": {"enum": [1, 2]}}}  # type: ignore[dict-item]
LOOK = {"type": "function", "name": "look", "parameters": PARAMETERS}
ASKED_AS_RESPONSE: dict[str, dict[str, Any]] = {
    "text": {"max_output_tokens": 12},
    "sampled": {"temperature": 1.3, "top_p": 0.9, "max_output_tokens": 12},
    "logprobs": {
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 3,
        "max_output_tokens": 8,
    },
    "a form": {"text": {"format": {"type": "json_schema", "name": "x", "schema": FORM}}},
    "a forced call": {"tools": [LOOK], **FORCED},
    "a call, perhaps": {"tools": [LOOK], "max_output_tokens": 60},
    "a call that breaks off": {"tools": [LOOK], **FORCED, "max_output_tokens": 9},
}
ASKED_AS_MESSAGE: dict[str, dict[str, Any]] = {
    "a form": {"output_config": {"format": {"type": "json_schema", "schema": FORM}}},
    "any call": {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
    "a named call": {"tool_choice": {"type": "tool", "name": "look"}, "temperature": 1},
    "a call that breaks off": {"tool_choice": {"type": "any"}, "max_tokens": 9},
}


@pytest.fixture(scope="module")
def asker(stack: Stack) -> Iterator[Asker]:
    calls = {**FORCED, "seed": 1}
    found = Asker(
        stack.base_url, stack.credentials["api_key"], model="penny", calls=calls, max_tokens=16
    )
    with found.http:
        yield found


@pytest.mark.parametrize("surface", EXAMPLES)
async def test_whatever_is_asked_is_answered_or_refused(asker: Asker, surface: str) -> None:
    asker.try_all(surface, EXAMPLES[surface])


async def test_all_of_it_is_billed_once(stack: Stack, asker: Asker) -> None:
    await balance(stack)
    rows = await stack.sql("SELECT * FROM usage_events")
    asker.check_bill(rows, int(stack.metric("tollgate_generation_tokens")))


@pytest.mark.parametrize("way", ASKED_AS_RESPONSE)
def test_a_response_streamed_is_the_whole_one(stack: Stack, way: str) -> None:
    client: OpenAI = stack.client(max_retries=0, _strict_response_validation=True)
    asked: dict[str, Any] = {"model": "penny", "input": "Hello, who are you?", "store": False}
    asked |= {"extra_body": {"seed": 7}, "max_output_tokens": 200, **ASKED_AS_RESPONSE[way]}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        *events, last = stream
    assert [extras(each) for each in (whole, *events)] == [[]] * (1 + len(events))
    assert last.type in ("response.completed", "response.incomplete")
    assert said_in(last.response) == said_in(whole)
    if way == "a form":
        jsonschema_rs.validate(FORM, json.loads(whole.output_text))
    if way == "a forced call":
        (call,) = whole.output
        assert call.type == "function_call"
        jsonschema_rs.validate(PARAMETERS, json.loads(call.arguments))
    if way == "logprobs":
        (message,) = whole.output
        assert message.type == "message" and message.content[0].type == "output_text"
        assert len(message.content[0].logprobs or ()) == 8


@pytest.mark.parametrize("way", ASKED_AS_MESSAGE)
def test_a_message_streamed_is_the_whole_one(stack: Stack, way: str) -> None:
    asked: dict[str, Any] = {
        "model": "penny",
        "max_tokens": 200,
        "messages": [{"role": "user", "content": "Hello, who are you?"}],
        "extra_body": {"temperature": 0},
        **ASKED_AS_MESSAGE[way],
    }
    asked["extra_body"] = {"temperature": asked.pop("temperature", 0), "top_k": 1}
    if "tool_choice" in asked:
        asked["tools"] = [{"name": "look", "input_schema": PARAMETERS}]
    with Anthropic(
        base_url=stack.base_url,
        api_key=stack.credentials["api_key"],
        max_retries=0,
        _strict_response_validation=True,
    ) as client:
        client.messages.create(**asked)  # what is cached is cached from now on
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
    assert extras(whole) == []
    assert said_by(streamed) == said_by(whole)
    if way == "a form":
        jsonschema_rs.validate(FORM, json.loads(whole.content[0].text))  # type: ignore[union-attr]
    elif "breaks" not in way:
        (call,) = whole.content
        assert call.type == "tool_use"
        jsonschema_rs.validate(PARAMETERS, call.input)
