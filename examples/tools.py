"""Lets a model call a function of this program and answer with what it returned."""

import json
import os

from openai import OpenAI


def get_weather(city: str) -> dict:
    return {"city": city, "celsius": 21, "sky": "clear"}


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}

client = OpenAI()
messages = [{"role": "user", "content": "What is the weather in Berlin?"}]
asked = {"model": os.environ["MODEL"], "tools": [TOOL], "max_tokens": 128}
# "required" is for penny, which is too small to choose well; a real model is left to choose.
first = client.chat.completions.create(messages=messages, tool_choice="required", **asked)
messages.append(first.choices[0].message)
for call in first.choices[0].message.tool_calls:
    arguments = json.loads(call.function.arguments)
    print(f"{call.function.name}({arguments})")
    result = json.dumps(get_weather(**arguments))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
last = client.chat.completions.create(messages=messages, tool_choice="none", **asked)
print(last.choices[0].message.content)
