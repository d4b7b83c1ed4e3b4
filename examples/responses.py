"""Goes on with a conversation that the gateway keeps (Responses API), then deletes it."""

import os

from openai import OpenAI

client = OpenAI()
first = client.responses.create(
    model=os.environ["MODEL"],
    instructions="Answer in one sentence.",
    input="Hello, my name is Ada.",
    max_output_tokens=64,
)
print(first.output_text)
second = client.responses.create(
    model=os.environ["MODEL"],
    previous_response_id=first.id,
    input="What is my name?",
    max_output_tokens=64,
)
print(second.output_text)
for each in (second, first):
    client.responses.delete(each.id)
