"""Speaks Anthropic's API with Anthropic's SDK, to the same model and with the same key."""

import os

from anthropic import Anthropic

client = Anthropic()
with client.messages.stream(
    model=os.environ["MODEL"],
    max_tokens=64,
    system="Answer in one sentence.",
    messages=[{"role": "user", "content": "Who are you?"}],
) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
    usage = stream.get_final_message().usage
print(f"\n{usage.input_tokens} tokens in, {usage.output_tokens} out")
