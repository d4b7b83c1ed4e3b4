"""openai-agents before a live server: a loop of tools on each of OpenAI's two surfaces.

It knows nothing of ours: what it asserts is what its user would see.
"""

from __future__ import annotations

import asyncio
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.result import RunResultBase
from openai import AsyncOpenAI

CITIES: list[str] = []


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    CITIES.append(city)
    return '{"degrees": 12, "sky": "sunny"}'


def check(result: RunResultBase, surface: str) -> str:
    """The tool was called once, with what was asked, and its result came to the answer."""
    kinds = [item.type for item in result.new_items]
    assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"], kinds
    assert CITIES == ["Oslo"], CITIES
    usage = result.context_wrapper.usage
    assert usage.requests == 2, usage
    assert usage.input_tokens > 0 and usage.output_tokens > 0, usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens, usage
    answer = str(result.final_output)
    assert "12" in answer, (surface, answer)
    CITIES.clear()
    return answer


async def main(base_url: str, key: str) -> None:
    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=base_url, api_key=key) as client:
        for model in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
            # After its first call the SDK asks with tool_choice auto again.
            agent = Agent(
                name="weather",
                model=model("penny", client),
                tools=[function_tool(get_weather)],
                model_settings=ModelSettings(
                    tool_choice="required", temperature=0.0, max_tokens=100, include_usage=True
                ),
            )
            question = "What is the weather in Oslo?"
            whole = check(await Runner.run(agent, question, max_turns=3), model.__name__)
            streamed = Runner.run_streamed(agent, question, max_turns=3)
            async for _ in streamed.stream_events():
                pass
            assert check(streamed, model.__name__) == whole
    print(
        "openai-agents: a loop of tools, whole and streamed, on responses and on chat completions"
    )


asyncio.run(main(*sys.argv[1:]))
