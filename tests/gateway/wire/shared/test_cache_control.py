"""`cache_control` in a conversation: where its breakpoints lie, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.generate_request import CacheBreakpoint, PromptPlace
from gateway.request_errors import BadField
from gateway.wire.openai.from_chat import from_openai

KEPT = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


def user(*parts: str | dict[str, Any], **fields: Any) -> dict[str, Any]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "text", **part}
        for part in parts
    ]
    return {"role": "user", "content": content, **fields}


def breakpoints(*messages: dict[str, Any], **fields: Any) -> tuple[CacheBreakpoint, ...]:
    body = json.dumps({"model": "m", "messages": messages, **fields}).encode()
    prompt = from_openai(body, "engine").prompt
    assert prompt is not None
    return prompt.breakpoints


def test_a_part_ends_in_its_message_and_the_last_one_with_it() -> None:
    first = {"text": "one", "cache_control": HOUR}
    last = {"text": "three", "cache_control": {**KEPT, "ttl": "5m"}}
    assert breakpoints({"role": "system", "content": "s"}, user(first, "two", last)) == (
        CacheBreakpoint(PromptPlace(2, len("one")), "1h"),
        CacheBreakpoint(PromptPlace(2), "5m"),
    )
    assert breakpoints(user("one", {"text": "two", "cache_control": KEPT}, "three")) == (
        CacheBreakpoint(PromptPlace(1, len("one\ntwo")), "5m"),
    )


def test_a_message_may_be_marked_whole() -> None:
    for role in ("system", "developer", "user", "assistant"):
        marked = {"role": role, "content": "hello", "cache_control": KEPT}
        assert breakpoints(marked, user("x")) == (CacheBreakpoint(PromptPlace(1), "5m"),)
    assert breakpoints(user("x", "y", cache_control=HOUR)) == (
        CacheBreakpoint(PromptPlace(1), "1h"),
    )
    assert breakpoints(user("x"), {**user("y"), "cache_control": None}) == ()


def test_a_tool_may_be_marked_and_what_it_answers() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "ab"]
    tools[1]["cache_control"] = HOUR
    call = {"id": "c", "type": "function", "function": {"name": "a", "arguments": "{}"}}
    called = {"role": "assistant", "tool_calls": [call], "cache_control": KEPT}
    answer = {"role": "tool", "tool_call_id": "c", "content": "1", "cache_control": KEPT}
    assert breakpoints(user("x"), called, answer, tools=tools) == (
        CacheBreakpoint(PromptPlace(num_tools=2), "1h"),
        CacheBreakpoint(PromptPlace(2), "5m"),
        CacheBreakpoint(PromptPlace(3), "5m"),
    )


def test_a_breakpoint_looks_back_over_twenty_blocks() -> None:
    turns = [user(str(number)) for number in range(18)]
    parts = user("a", "b", {"text": "c", "cache_control": KEPT})
    [found] = breakpoints(*turns, parts)
    assert found == CacheBreakpoint(PromptPlace(19), "5m", since=PromptPlace(1))
    [near] = breakpoints(*turns[1:], parts)
    assert near.since is None, "all of what is before it"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([user({"text": "x", "cache_control": {**KEPT, "ttl": "2h"}})],
         "messages[0].content[0].cache_control.ttl"),
        ([user({"text": "x", "cache_control": {"type": "persistent"}})],
         "messages[0].content[0].cache_control.type"),
        ([user("x", cache_control={**KEPT, "scope": "org"})], "messages[0].cache_control.scope"),
        ([user("x", cache_control=KEPT)] * 5, "messages[4].cache_control"),
        ([user("x", {"text": "", "cache_control": KEPT})], "messages[0].content[1].cache_control"),
        ([user(cache_control=KEPT), user("x")], "messages[0].cache_control"),
        ([user("x", cache_control=KEPT), user("y", cache_control=HOUR)],
         "messages[1].cache_control.ttl"),
    ],
)  # fmt: skip
def test_what_means_nothing_is_refused_by_name(messages: list[Any], param: str) -> None:
    with pytest.raises(BadField) as caught:
        breakpoints(*messages)
    assert caught.value.param == param


def test_beside_the_conversation_there_is_no_such_field() -> None:
    body = {"model": "m", "messages": [user("x")], "cache_control": KEPT}
    with pytest.raises(BadField) as caught:
        from_openai(json.dumps(body).encode(), "engine")
    assert caught.value.param == "cache_control"
