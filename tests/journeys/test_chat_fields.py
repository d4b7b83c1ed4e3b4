"""The fields of a chat completion as the official SDK asks for them and reads the answers:
sampling, forms, tools in a loop; sync and async, whole, parsed, and accumulated of a stream."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, Literal

import jsonschema_rs
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState
from pydantic import BaseModel, ConfigDict, Field

from tests.journeys.reports import events
from tests.journeys.sdk.sdk_shapes import extras, said
from tests.stack import Stack

pytestmark = pytest.mark.slow

HELLO: Any = [{"role": "user", "content": "Hello, who are you?"}]


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    mood: Literal["good", "bad"]
    age: int = Field(ge=0, le=150)
    likes: list[Literal["tea", "rain"]] = Field(max_length=2)


@pytest.fixture
def client(stack: Stack) -> OpenAI:
    return stack.client(max_retries=0, _strict_response_validation=True)


def asked(**options: Any) -> dict[str, Any]:
    return {"model": "penny", "messages": HELLO, "max_tokens": 60, "seed": 7} | options


USED: Any = {"include_usage": True}


def accumulated(client: OpenAI, **request: Any) -> Any:
    state = ChatCompletionStreamState[Any](input_tools=request.get("tools", openai.omit))
    for chunk in client.chat.completions.create(**request, stream=True, stream_options=USED):
        state.handle_chunk(chunk)
    return state.current_completion_snapshot


def helped(client: OpenAI, **options: Any) -> Any:
    """As the SDK's own helper does it, which refuses to read half of an answer."""
    with client.chat.completions.stream(**asked(**options), stream_options=USED) as stream:
        for event in stream:
            assert event.type != "error"
        return stream.get_final_completion()


SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded, of several": {"n": 3, "temperature": 1.3, "top_p": 0.9},
    "logprobs": {"logprobs": True, "top_logprobs": 3, "max_tokens": 8},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.5, "logit_bias": {"5": -100}},
    "stopped": {"temperature": 0, "stop": ["penny", "Tollgate", "zzz", "a"]},
    "cut": {"max_completion_tokens": 3, "max_tokens": openai.omit},
    "extensions": {"extra_body": {"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.1}},
    "labels": {
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "metadata": {"a": "b"},
        "store": False,
        "reasoning_effort": "none",
        "service_tier": "default",
    },
}


@pytest.mark.parametrize("options", SAMPLED.values(), ids=SAMPLED.keys())
def test_a_stream_adds_up_to_the_whole_answer(client: OpenAI, options: dict[str, Any]) -> None:
    whole = client.chat.completions.create(**asked(**options))
    assert extras(whole) == []
    streamed = accumulated(client, **asked(**options))
    assert extras(streamed) == []
    assert said(streamed) == said(whole)
    if "logprobs" in options:
        logprobs = whole.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        text = b"".join(bytes(each.bytes or []) for each in logprobs.content).decode()
        assert text == whole.choices[0].message.content
        assert all(len(each.top_logprobs) == 3 for each in logprobs.content)


def test_an_answer_is_of_its_schema_whole_and_streamed(client: OpenAI) -> None:
    options: dict[str, Any] = {"response_format": Person, "temperature": 1, "max_tokens": 400}
    parsed = client.chat.completions.parse(**asked(**options))
    message = parsed.choices[0].message
    assert parsed.choices[0].finish_reason == "stop"
    assert isinstance(message.parsed, Person)
    assert message.content is not None
    assert Person.model_validate_json(message.content) == message.parsed
    assert said(helped(client, **options)) == said(parsed)


class City(BaseModel):
    name: str
    population: int


def test_a_class_with_free_fields_is_parsed_without_a_bound_of_the_request(client: OpenAI) -> None:
    """penny's folder bounds what the schema leaves free, so that no field goes on and on."""
    text: Any = [{"role": "user", "content": "Bern has 134591 inhabitants. Answer as JSON."}]
    options: dict[str, Any] = {"max_tokens": openai.omit, "messages": text, "temperature": 0}
    parsed = client.chat.completions.parse(**asked(**options), response_format=City)
    city = parsed.choices[0].message.parsed
    assert parsed.choices[0].finish_reason == "stop"
    assert city is not None and len(city.name) <= 48 and abs(city.population) <= 999_999
    assert parsed.usage is not None and parsed.usage.completion_tokens < 200


EBNF = """# as vLLM's users write it
root ::= condition (" or " condition)?
condition ::= name "="
  [0-9]{1,3}
name ::= [a-c] | [a-c] name-of-two
name-of-two ::= [a-c]
"""


@pytest.mark.parametrize("surface", ["chat", "completions"])
def test_async_and_each_form_that_can_be_asked_for(stack: Stack, surface: str) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    strict = {"name": "a", "strict": True, "schema": schema}
    forms: list[dict[str, Any]] = [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": strict}},
        {"structured_outputs": {"json": schema}},
        {"structured_outputs": {"regex": "[0-9]{3}-[a-c]{1,4}x"}},
        {"structured_outputs": {"choice": ["yes", "no way"]}},
        {"guided_grammar": 'start: "<" /[a-z]{2,5}/ ">"'},
        {"structured_outputs": {"grammar": EBNF}},
    ]

    async def ask_all() -> list[str]:
        key = stack.credentials
        async with AsyncOpenAI(base_url=key["base_url"], api_key=key["api_key"]) as client:
            create: Any = client.completions.create
            options: dict[str, Any] = {"model": "penny", "prompt": "It is", "seed": 7}
            if surface == "chat":
                create, options = client.chat.completions.create, asked()
            options |= {"temperature": 0.7, "max_tokens": 300}
            answers = await asyncio.gather(*(create(**options, extra_body=each) for each in forms))
        choices = [answer.choices[0] for answer in answers]
        assert {each.finish_reason for each in choices[1:]} == {"stop"}
        return [each.message.content if surface == "chat" else each.text for each in choices]

    texts = asyncio.run(ask_all())
    assert texts[0].startswith("{")
    assert json.loads(texts[1]).keys() == {"a"}
    assert json.loads(texts[2])["a"] in (1, 2)
    assert re.fullmatch("[0-9]{3}-[a-c]{1,4}x", texts[3])
    assert texts[4] in ("yes", "no way")
    assert re.fullmatch("<[a-z]{2,5}>", texts[5])
    assert re.fullmatch("[a-c]{1,2}=[0-9]{1,3}( or [a-c]{1,2}=[0-9]{1,3})?", texts[6])


def case(schema: Any) -> dict[str, Any]:
    described = {"name": "x", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": described}}


HOSTILE = {
    "5 ** 12 cases": {
        "allOf": [
            {"anyOf": [{"properties": {f"p{i}{k}": {"type": "string"}}} for k in range(5)]}
            for i in range(12)
        ]
    },
    "no schema": {"type": "nothing"},
    "a reference to nowhere": {"$ref": "#/$defs/x"},
    "nothing fits": {"type": "object", "required": ["a"], "properties": {"a": False}},
    "too large": {"enum": ["x" * 1000 + str(n) for n in range(200)]},
}


@pytest.mark.parametrize("schema", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_kept_to_is_refused_by_its_name(
    client: OpenAI, schema: Any, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked(stream=stream, **case(schema)))
    assert caught.value.param == "response_format.json_schema.schema"


def test_what_was_refused_is_not_billed_and_holds_nothing(stack: Stack, client: OpenAI) -> None:
    stack.wait("what was reserved is settled", lambda: stack.open_leases() == 0)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**asked(**case({"type": "nothing"})))
    assert stack.open_leases() == 0


# ---- tools


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
WEATHER_ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Berlin?"}]


class Move(BaseModel):
    model_config = ConfigDict(extra="forbid")

    steps: int = Field(ge=0, le=9)
    to: Literal["here", "there"]


def with_tools(**options: Any) -> dict[str, Any]:
    base = {"messages": WEATHER_ASKED, "max_tokens": 120, "seed": 3, "temperature": 0}
    return asked(**(base | {"tools": TOOLS} | options))


def check_calls(choice: Any) -> list[str]:
    assert choice.finish_reason == "tool_calls"
    for call in choice.message.tool_calls:
        jsonschema_rs.validate(SCHEMAS[call.function.name], json.loads(call.function.arguments))
    return [call.function.name for call in choice.message.tool_calls]


def test_the_model_calls_and_reads_the_result(client: OpenAI) -> None:
    first = client.chat.completions.create(**with_tools(tools=[WEATHER]))
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
        **with_tools(tools=[WEATHER], messages=[*WEATHER_ASKED, choice.message, result])
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
def test_a_stream_with_tools_adds_up_to_the_whole_answer(client: OpenAI, way: str) -> None:
    whole = client.chat.completions.create(**with_tools(**WAYS[way]))
    streamed = accumulated(client, **with_tools(**WAYS[way]))
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
                client.chat.completions.create(**with_tools(**options, seed=seed), stream=False)
                for seed in range(8)
            ]
            return list(await asyncio.gather(*tasks))

    names = [check_calls(answer.choices[0]) for answer in asyncio.run(ask_all())]
    assert {len(each) for each in names} == {1}


def test_strict_tools_are_parsed_by_the_sdk(client: OpenAI) -> None:
    strict = openai.pydantic_function_tool(Move, name="move")
    for choice in ("auto", "required"):
        options = {"tools": [strict], "tool_choice": choice, "parallel_tool_calls": False}
        parsed = client.chat.completions.parse(**with_tools(**options, max_tokens=400))
        for call in parsed.choices[0].message.tool_calls or ():
            assert isinstance(call.function.parsed_arguments, Move)
        assert choice == "auto" or parsed.choices[0].message.tool_calls


def test_a_call_or_an_answer_of_its_schema(client: OpenAI) -> None:
    schema = {"name": "a", "schema": {"type": "object", "properties": {"a": {"enum": [1, 2]}}}}
    answer = client.chat.completions.create(
        **with_tools(
            response_format={"type": "json_schema", "json_schema": schema}, tools=[WEATHER]
        )
    )
    message = answer.choices[0].message
    assert message.tool_calls or json.loads(message.content or "")["a"] in (1, 2)


def test_a_hostile_schema_of_a_tool_is_named(client: OpenAI) -> None:
    hostile = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/no"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**with_tools(tools=[hostile], tool_choice="required"))
    assert caught.value.param == "tools[0].function.parameters"


def test_tools_wait_in_the_agentic_lane_and_are_billed(stack: Stack, client: OpenAI) -> None:
    answer = client.chat.completions.with_raw_response.create(**with_tools())
    usage, request_id = answer.parse().usage, answer.headers["x-request-id"]
    assert usage is not None

    def billed() -> list[Any]:
        return [each for each in events(stack, "penny") if each.request_id == request_id]

    stack.wait("it is there", billed)
    (event,) = billed()
    assert (event.lane, event.output) == ("agentic", usage.completion_tokens)
