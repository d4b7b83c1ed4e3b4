"""Responses by the official SDK before penny herself: answers and calls parsed into pydantic's
models, and a background response that is followed over two workers, cut off after each event."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.journeys.sdk.sdk_shapes import extras
from tests.stack import Stack

pytestmark = pytest.mark.slow


class Pet(BaseModel):
    name: Literal["Rex", "Ü"]
    legs: Literal[2, 4]


class Owner(BaseModel):
    is_known: bool
    pet: Pet
    other: Pet | None


class Walk(BaseModel):
    pet: Literal["Rex", "Ü"]
    is_far: bool


ASKED: dict[str, Any] = {
    "model": "penny",
    "input": "Hello, who are you?",
    "max_output_tokens": 400,
    "temperature": 0.7,
    "extra_body": {"seed": 7},
}


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[OpenAI]:
    with stack.client(max_retries=0, _strict_response_validation=True) as found:
        yield found


def test_an_answer_is_parsed_into_a_model_whole_and_streamed(client: OpenAI) -> None:
    parsed = client.responses.parse(**ASKED, text_format=Owner)
    assert parsed.status == "completed"
    assert isinstance(parsed.output_parsed, Owner)
    assert Owner.model_validate_json(parsed.output_text) == parsed.output_parsed
    with client.responses.stream(**ASKED, text_format=Owner) as stream:
        streamed = stream.get_final_response()
    assert streamed.output_parsed == parsed.output_parsed


def test_a_call_is_parsed_into_a_model(client: OpenAI) -> None:
    walk = openai.pydantic_function_tool(Walk, name="walk")
    asked = {**ASKED, "tools": [walk], "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = client.responses.parse(**asked).output
    assert call.type == "function_call" and isinstance(call.parsed_arguments, Walk)


LINES = 'start: line{1,3}\nline: ("+" | "-") /[a-c"]{1,4}/ "\\n"'


@pytest.mark.parametrize(
    ("syntax", "definition", "texts"),
    [("lark", LINES, r'([+-][a-c"]{1,4}\n){1,3}'), ("regex", r'"[a-c]{2}"', '"[a-c]{2}"')],
)
def test_a_tool_of_free_text_is_called_with_a_text_of_its_grammar(
    client: OpenAI, syntax: str, definition: str, texts: str
) -> None:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    tool = {"type": "custom", "name": "write", "format": form}
    tools: Any = [{"type": "namespace", "name": "files", "description": "", "tools": [tool]}]
    asked = {**ASKED, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = client.responses.create(**asked).output
    assert call.type == "custom_tool_call" and extras(call) == []
    assert (call.namespace, call.name) == ("files", "write")
    assert re.fullmatch(texts, call.input), call.input
    output: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."}
    again: Any = [{"role": "user", "content": "Go on."}, call.to_dict(), output]
    assert client.responses.create(**{**ASKED, "input": again, "tools": tools}).output


def test_a_call_is_continued_with_its_output_alone(client: OpenAI) -> None:
    walk: Any = {"type": "function", "name": "walk", "parameters": Walk.model_json_schema()}
    asked = {**ASKED, "tools": [walk], "tool_choice": "required", "parallel_tool_calls": False}
    held = client.conversations.create()
    for where in ({}, {"conversation": held.id}):
        made = client.responses.create(**asked, **where)
        (call,) = made.output
        assert call.type == "function_call"
        before = where or {"previous_response_id": made.id}
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**{**ASKED, "input": "And?"}, **before)
        assert caught.value.param == "input"
        assert f"No tool output found for function call {call.call_id}." in str(caught.value)
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "ok"}
        answer = client.responses.create(**{**ASKED, "input": [output]}, **before)
        assert answer.output_text


def test_a_background_response_is_followed_event_by_event_over_two_workers(
    client: OpenAI, stack: Stack
) -> None:
    """Each time by another connection, which either worker may have taken."""
    asked = {**ASKED, "max_output_tokens": 24, "background": True, "stream": True}
    with client.responses.create(**asked) as stream:
        first = next(iter(stream))
    assert first.type == "response.created" and first.sequence_number == 0
    events: list[Any] = [first]
    ends = ("response.completed", "response.incomplete", "response.failed")
    while events[-1].type not in ends:
        assert len(events) < 200
        with (
            stack.client(max_retries=0, _strict_response_validation=True) as other,
            other.responses.retrieve(
                first.response.id, stream=True, starting_after=events[-1].sequence_number
            ) as following,
        ):
            events.append(next(iter(following)))
    assert [each.sequence_number for each in events] == list(range(len(events)))
    assert [extras(each) for each in events] == [[]] * len(events)
    found = client.responses.retrieve(first.response.id)
    assert events[-1].response.to_dict() == found.to_dict()
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == found.output_text != ""
