"""Checks that the search through the SDKs' answers finds what is wrong with them."""

from __future__ import annotations

from typing import Any

from openai.types.chat import ChatCompletion

from tests.journeys.sdk.sdk_shapes import extras, said

USED = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}


def completion(**fields: Any) -> ChatCompletion:
    message = {"role": "assistant", "content": "x"}
    body: dict[str, Any] = {
        "id": "c",
        "created": 1,
        "model": "m",
        "object": "chat.completion",
        "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        "usage": {**USED, "prompt_tokens_details": {"cached_tokens": 1}},
    }
    return ChatCompletion.construct(**(body | fields))


def test_what_is_too_much_and_what_is_missing_is_told_by_its_path() -> None:
    assert extras(completion()) == []
    choice = {"finish_reason": "stop", "message": {"role": "assistant", "new": 1}}
    assert extras(completion(choices=[choice], other=2)) == [
        ".other",
        ".choices[0].index is missing",
        ".choices[0].message.new",
    ]
    used = {"prompt_tokens": 1, "total_tokens": 3}
    assert extras(completion(usage=used)) == [".usage.completion_tokens is missing"]


def test_answers_of_another_use_are_not_the_same() -> None:
    whole = completion()
    cached = {**USED, "prompt_tokens_details": {"cached_tokens": 0}}
    assert said(whole) == said(completion(id="d", created=2, usage=cached))
    other = completion(usage={**cached, "completion_tokens": 3})
    assert said(whole) != said(other)
    assert said(whole, usage=False) == said(other, usage=False)
