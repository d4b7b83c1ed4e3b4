"""Asks one question with OpenAI's SDK, and shows what the answer cost."""

import os

from openai import OpenAI

client = OpenAI()
answer = client.chat.completions.create(
    model=os.environ["MODEL"],
    messages=[{"role": "user", "content": "Who are you?"}],
    max_tokens=64,
    extra_headers={"X-Tollgate-Cost": "true", "X-Tollgate-Tags": "team=examples"},
)
print(answer.choices[0].message.content)
print(answer.usage.model_dump_json(exclude_none=True))
