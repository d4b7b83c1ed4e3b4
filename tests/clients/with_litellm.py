"""litellm before a live server, as OpenAI's API and as Anthropic's: an answer, its stream, tools.

It knows nothing of ours: what it asserts is what its user would see.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

QUESTION = [{"role": "user", "content": "What is the weather in Oslo?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


litellm.suppress_debug_info = True  # what it prints of models that it has no price of


def main(base_url: str, key: str) -> None:
    # The form of each provider's `api_base` is litellm's own: Anthropic's goes without `/v1`.
    check("openai/penny", api_base=base_url, api_key=key)
    check("anthropic/penny", api_base=base_url.removesuffix("/v1"), api_key=key)
    print("litellm: completion, streaming, tools as openai/penny and as anthropic/penny")


def check(model: str, **where: str) -> None:
    asked: dict[str, Any] = {"model": model, "temperature": 0.0, "max_tokens": 60, **where}
    hello = [{"role": "user", "content": "Who are you?"}]
    whole = litellm.completion(messages=hello, **asked)
    streamed = rebuilt(messages=hello, **asked)
    text = whole.choices[0].message.content
    assert text and streamed.choices[0].message.content == text, (streamed, whole)
    assert streamed.choices[0].finish_reason == whole.choices[0].finish_reason
    for usage in (whole.usage, streamed.usage):
        assert usage.prompt_tokens > 0 and usage.completion_tokens > 0, usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens
    forced = {**asked, "tools": [TOOL], "tool_choice": "required"}
    message = litellm.completion(messages=QUESTION, **forced).choices[0].message
    arguments = arguments_of(message)
    assert arguments == {"city": "Oslo"}, message
    assert arguments_of(rebuilt(messages=QUESTION, **forced).choices[0].message) == arguments
    result = {
        "role": "tool",
        "tool_call_id": message.tool_calls[0].id,
        "content": '{"degrees": 12, "sky": "sunny"}',
    }
    answer = litellm.completion(messages=[*QUESTION, message, result], tools=[TOOL], **asked)
    assert "12" in answer.choices[0].message.content, answer


def rebuilt(**asked: Any) -> Any:
    """Return what litellm's own accumulator makes of the stream."""
    chunks = litellm.completion(stream=True, stream_options={"include_usage": True}, **asked)
    return litellm.stream_chunk_builder(list(chunks), messages=asked["messages"])


def arguments_of(message: Any) -> Any:
    (call,) = message.tool_calls
    assert call.function.name == "get_weather", call
    return json.loads(call.function.arguments)


main(*sys.argv[1:])
