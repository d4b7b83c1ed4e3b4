"""langchain-openai before a live server: an answer, its stream, tools, an answer of a schema.

It knows nothing of ours: what it asserts is what its user would see.
"""

from __future__ import annotations

import sys
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

QUESTION = "What is the weather in Oslo?"


class Weather(BaseModel):
    """Get the weather of a city."""

    city: str


class Sky(BaseModel):
    """How the sky is."""

    sky: Literal["sunny", "rainy"]


def main(base_url: str, key: str) -> None:
    for responses in (False, True):
        model = ChatOpenAI(
            model="penny",
            base_url=base_url,
            api_key=key,
            temperature=0.0,
            max_completion_tokens=60,
            stream_usage=True,
            use_responses_api=responses,
        )
        check_answers(model)
        check_tools(model)
        for method in ("json_schema", "function_calling"):
            found = model.with_structured_output(Sky, method=method).invoke(QUESTION)
            assert isinstance(found, Sky), (method, found)
    print("langchain-openai: invoke, stream, bind_tools, with_structured_output on both surfaces")


def check_answers(model: ChatOpenAI) -> None:
    """The stream is the whole answer in pieces, and both say what they used."""
    whole = model.invoke("Who are you?")
    first, *rest = model.stream("Who are you?")
    for chunk in rest:
        first += chunk
    assert whole.text and first.text == whole.text, (first, whole)
    for usage in (whole.usage_metadata, first.usage_metadata):
        assert usage["input_tokens"] > 0 and usage["output_tokens"] > 0, usage
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"], usage
    assert first.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


def check_tools(model: ChatOpenAI) -> None:
    """A forced call's arguments validate, streamed or not, and its result can be given back."""
    bound = model.bind_tools([Weather], tool_choice="required")
    asked = bound.invoke(QUESTION)
    (call,) = asked.tool_calls
    assert (call["name"], Weather(**call["args"]).city) == ("Weather", "Oslo"), call
    first, *rest = bound.stream(QUESTION)
    for chunk in rest:
        first += chunk
    assert [each["args"] for each in first.tool_calls] == [call["args"]], first
    result = ToolMessage('{"degrees": 12, "sky": "sunny"}', tool_call_id=call["id"])
    answer = model.bind_tools([Weather]).invoke([HumanMessage(QUESTION), asked, result])
    assert "12" in answer.text, answer


main(*sys.argv[1:])
