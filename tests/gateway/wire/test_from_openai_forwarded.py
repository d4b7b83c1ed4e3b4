"""Bodies to requests of upstreams: what is forwarded, what is named, and how much one may be."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.generate_request import ModelKind
from gateway.wire.openai.chat import MAX_MESSAGES, MAX_PARTS
from gateway.wire.openai.forward import BILLED_OTHERWISE, MAX_TOOLS
from gateway.wire.openai.from_chat import from_openai
from tests.gateway.wire.openai.test_from_chat import HELLO, encode, refused


def test_everything_unknown_is_forwarded() -> None:
    fields = {
        "vendor": {"deep": [1, None]},
        "temperature": 99,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "n": 3,
        "stream": True,
        "stream_options": {"include_usage": True, "x": 1},
        "service_tier": "default",
        "prompt_cache_options": {"ttl": "30m"},
    }
    request = from_openai(encode(**fields), "upstream")
    assert request.forward == {"model": "m", "messages": HELLO, **fields}
    assert request.prompt is None
    assert (request.n, request.stream, request.include_usage) == (3, True, True)


@pytest.mark.parametrize("tier", ["priority", "fast", "flex"])
def test_a_tier_of_ours_is_understood_and_no_upstream_hears_of_it(tier: str) -> None:
    ours = from_openai(encode(service_tier=tier), "engine")
    theirs = from_openai(encode(service_tier=tier), "upstream")
    assert ours.service_tier == theirs.service_tier == tier
    assert theirs.forward == {"model": "m", "messages": HELLO}


def test_who_offers_tools_is_known() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert from_openai(encode(tools=[tool]), "upstream").has_tools
    assert from_openai(encode(functions=[{"name": "f"}]), "upstream").has_tools
    for none in ({}, {"tools": []}, {"tools": None}):
        assert not from_openai(encode(**none), "upstream").has_tools


PART = {"type": "text", "text": "x"}
NOT_FORWARDED = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": {}}, "messages"),
    ({"messages": [1]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [1]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{**PART, "cache_control": {"ttl": "1h"}}]}]},
        "messages[0].content[0].cache_control.ttl",
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [{**PART, "prompt_cache_breakpoint": {"ttl": "12h"}}]}
            ]
        },
        "messages[0].content[0].prompt_cache_breakpoint.ttl",
    ),
    ({"stream": 1}, "stream"),
    ({"stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": 1}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": 129}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 2**31}, "max_completion_tokens"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": ["x"]}, "tools[0].type"),
    ({"prompt_cache_options": {"ttl": "24h"}}, "prompt_cache_options.ttl"),
    *(({name: {}}, name) for name in BILLED_OTHERWISE),
    *(
        ({name: ["x"]}, name)
        for name in ("models", "route", "provider", "preset", "transforms", "plugins", "fallbacks")
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        "messages[0].content[0].type",
    ),
]


@pytest.mark.parametrize(("fields", "param"), NOT_FORWARDED)
def test_what_would_change_the_bill_is_named(fields: dict[str, Any], param: str) -> None:
    assert refused(encode(**fields), "upstream").param == param


TEXT = {"type": "text", "text": ""}
MANY = 10_000


def messages_of(num_messages: int, num_parts: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [TEXT] * num_parts}] * num_messages


@pytest.mark.parametrize("kind", ["engine", "upstream"])
def test_a_request_has_so_many_messages_and_parts(kind: ModelKind) -> None:
    assert (MAX_MESSAGES, MAX_PARTS) == (MANY, MANY)
    for num_messages, num_parts in ((MANY, 1), (1, MANY), (2, MANY // 2)):
        assert from_openai(encode(messages=messages_of(num_messages, num_parts)), kind).n == 1
    for num_messages, num_parts in ((MANY + 1, 0), (1, MANY + 1), (2, MANY // 2 + 1)):
        body = encode(messages=messages_of(num_messages, num_parts))
        assert refused(body, kind).param == "messages"


def test_an_upstream_is_sent_so_many_tools() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert from_openai(encode(tools=[tool] * MAX_TOOLS), "upstream").n == 1
    assert refused(encode(tools=[tool] * (MAX_TOOLS + 1)), "upstream").param == "tools"


def test_null_changes_no_bill() -> None:
    names = [*BILLED_OTHERWISE, "service_tier", "modalities", "n", "max_tokens", "tools", "stream"]
    assert from_openai(encode(**dict.fromkeys(names)), "upstream").n == 1
