"""Tool loops with the official SDK against penny: calls that the model makes by itself, calls that
are forced, in a stream and whole, sync and async; and what comes of their results."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import jsonschema_rs
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState
from pydantic import BaseModel, ConfigDict, Field

from tests.journeys.reports import events
from tests.journeys.sdk_shapes import extras, said
from tests.stack import Stack

pytestmark = pytest.mark.slow


def tool(name: str, about: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": parameters},
    }


WEATHER = tool("get_weather", "Get the weather of a city.", city={"type": "string", "maxLength": 9})
PLACES = {"type": "array", "items": {"enum": ["here", "there"]}, "minItems": 1, "maxItems": 2}
MOVE = tool("move", "Move some.", steps={"type": "integer", "maximum": 9}, to=PLACES)
TOOLS = [WEATHER, MOVE]
SCHEMAS = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Berlin?"}]


class Move(BaseModel):
    model_config = ConfigDict(extra="forbid")

    steps: int = Field(ge=0, le=9)
    to: Literal["here", "there"]


@pytest.fixture
def client(stack: Stack) -> OpenAI:
    return stack.client(max_retries=0, _strict_response_validation=True)


def asked(**options: Any) -> dict[str, Any]:
    base = {"model": "penny", "messages": ASKED, "max_tokens": 120, "seed": 3, "temperature": 0}
    return base | {"tools": TOOLS} | options


def accumulated(client: OpenAI, **options: Any) -> Any:
    state = ChatCompletionStreamState[Any](input_tools=options.get("tools", TOOLS))
    for chunk in client.chat.completions.create(**asked(**options), stream=True):
        state.handle_chunk(chunk)
    return state.current_completion_snapshot


def check_calls(choice: Any) -> list[str]:
    assert choice.finish_reason == "tool_calls"
    for call in choice.message.tool_calls:
        jsonschema_rs.validate(SCHEMAS[call.function.name], json.loads(call.function.arguments))
    return [call.function.name for call in choice.message.tool_calls]


def test_the_model_calls_and_reads_the_result(client: OpenAI) -> None:
    first = client.chat.completions.create(**asked(tools=[WEATHER]))
    [choice] = first.choices
    assert check_calls(choice) == ["get_weather"]
    assert choice.message.content is None
    assert extras(first) == []
    assert choice.message.tool_calls is not None
    result = {
        "role": "tool",
        "tool_call_id": choice.message.tool_calls[0].id,
        "content": '{"degrees": 7, "sky": "cloudy"}',
    }
    second = client.chat.completions.create(
        **asked(tools=[WEATHER], messages=[*ASKED, choice.message, result])
    )
    assert second.choices[0].finish_reason == "stop"
    assert second.choices[0].message.content
    assert second.usage is not None and first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


WAYS: dict[str, dict[str, Any]] = {
    "auto": {"tools": [WEATHER]},
    "none": {"tool_choice": "none"},
    "required": {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1},
    "named": {"tool_choice": {"type": "function", "function": {"name": "move"}}, "temperature": 1},
    "several choices": {"tool_choice": "required", "n": 2, "temperature": 1.2, "max_tokens": 60},
    "with logprobs": {"tools": [WEATHER], "logprobs": True, "top_logprobs": 1},
    "cut": {"tools": [WEATHER], "max_tokens": 12},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_stream_adds_up_to_the_whole_answer(client: OpenAI, way: str) -> None:
    whole = client.chat.completions.create(**asked(**WAYS[way]))
    streamed = accumulated(client, **WAYS[way])
    assert extras(whole) == extras(streamed) == []
    assert said(streamed) == said(whole)
    match way:
        case "named":
            assert check_calls(whole.choices[0]) == ["move"]
        case "required":
            assert len(check_calls(whole.choices[0])) == 1
        case "none":
            assert whole.choices[0].message.tool_calls is None


def test_forced_calls_are_valid_whatever_is_drawn(stack: Stack) -> None:
    async def ask_all() -> list[Any]:
        key = stack.credentials
        async with AsyncOpenAI(base_url=key["base_url"], api_key=key["api_key"]) as client:
            options = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.5}
            tasks = [
                client.chat.completions.create(**asked(**options, seed=seed), stream=False)
                for seed in range(8)
            ]
            return list(await asyncio.gather(*tasks))

    names = [check_calls(answer.choices[0]) for answer in asyncio.run(ask_all())]
    assert {len(each) for each in names} == {1}


def test_strict_tools_are_parsed_by_the_sdk(client: OpenAI) -> None:
    strict = openai.pydantic_function_tool(Move, name="move")
    for choice in ("auto", "required"):
        options = {"tools": [strict], "tool_choice": choice, "parallel_tool_calls": False}
        parsed = client.chat.completions.parse(**asked(**options, max_tokens=400))
        for call in parsed.choices[0].message.tool_calls or ():
            assert isinstance(call.function.parsed_arguments, Move)
        assert choice == "auto" or parsed.choices[0].message.tool_calls


def test_a_call_or_an_answer_of_its_schema(client: OpenAI) -> None:
    schema = {"name": "a", "schema": {"type": "object", "properties": {"a": {"enum": [1, 2]}}}}
    answer = client.chat.completions.create(
        **asked(response_format={"type": "json_schema", "json_schema": schema}, tools=[WEATHER])
    )
    message = answer.choices[0].message
    assert message.tool_calls or json.loads(message.content or "")["a"] in (1, 2)


def test_a_hostile_schema_of_a_tool_is_named(client: OpenAI) -> None:
    hostile = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/no"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked(tools=[hostile], tool_choice="required"))
    assert caught.value.param == "tools[0].function.parameters"


def test_tools_wait_in_the_agentic_lane_and_are_billed(stack: Stack, client: OpenAI) -> None:
    before = {event.id for event in events(stack, "penny")}
    usage = client.chat.completions.create(**asked()).usage
    assert usage is not None
    stack.wait("it is there", lambda: bool({e.id for e in events(stack, "penny")} - before))
    (event,) = (each for each in events(stack, "penny") if each.id not in before)
    assert (event.lane, event.output) == ("agentic", usage.completion_tokens)
