"""Anthropic's conversations that hypothesis makes up, before penny's own template and tokenizer, as
`test_conversations` has those of chat: each is answered, its stream adds up to the whole and every
token counts, or it is refused by a field of it."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.fleet.prepare_threads import PrepareThreads
from gateway.wire.anthropic.from_anthropic import from_count_tokens
from gateway.wire.surfaces import MESSAGES
from tests.budget import examples
from tests.gateway.fleet.both_ways import asked_both_ways
from tests.gateway.fleet.test_conversations import ANSWER, TEXT, without_none
from tests.gateway.wire.anthropic.test_to_anthropic import read_stream, read_whole
from tests.journeys.sdk.sdk_shapes import extras, said_by

KEPT = st.sampled_from([None, None, {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}])
NAME = st.sampled_from(["f", "g"])
ID = st.sampled_from(["toolu_1", "toolu_2"])
BLOCK = st.one_of(
    st.builds(
        lambda text, kept: without_none(type="text", text=text, cache_control=kept), TEXT, KEPT
    ),
    st.builds(lambda text: {"type": "thinking", "thinking": text, "signature": "s"}, TEXT),
    st.builds(
        lambda id_, name, given, kept: without_none(
            type="tool_use", id=id_, name=name, input=given, cache_control=kept
        ),
        ID,
        NAME,
        st.sampled_from([{}, {"a": [1, "ü"]}, {"a": {"b": None}}]),
        KEPT,
    ),
    st.builds(
        lambda id_, content, failed, kept: without_none(
            type="tool_result",
            tool_use_id=id_,
            content=content,
            is_error=failed,
            cache_control=kept,
        ),
        ID,
        st.none() | TEXT | st.lists(st.builds(lambda text: {"type": "text", "text": text}, TEXT)),
        st.none() | st.booleans(),
        KEPT,
    ),
    st.builds(lambda kind: {"type": kind}, st.sampled_from(["image", "redacted_thinking"])),
)
MESSAGE = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "assistant", "user", "assistant", "system"]),
    TEXT | st.lists(BLOCK, max_size=3),
)
LOOP = st.builds(
    lambda said, given, result, kept: [
        {"role": "user", "content": said},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "f", "input": given}],
        },
        {
            "role": "user",
            "content": [
                without_none(
                    type="tool_result", tool_use_id="t", content=result, cache_control=kept
                )
            ],
        },
    ],
    TEXT,
    st.sampled_from([{}, {"a": 1}]),
    TEXT,
    KEPT,
)
"""Whole turns, which are seldom made of blocks by chance."""
TOOL = st.builds(
    lambda name, strict, kept: without_none(
        name=name, input_schema={"type": "object"}, strict=strict, cache_control=kept
    ),
    NAME,
    st.none() | st.just(False),
    KEPT,
)
FIELDS = st.fixed_dictionaries(
    {
        "messages": st.lists(MESSAGE, min_size=1, max_size=5)
        | st.builds(list.__add__, LOOP, st.lists(MESSAGE, max_size=2)),
        "max_tokens": st.sampled_from([1, 3, 40, 10**9]),
    },
    optional={
        "system": TEXT | st.lists(st.builds(lambda text: {"type": "text", "text": text}, TEXT)),
        "tools": st.lists(TOOL, max_size=3, unique_by=lambda tool: tool["name"]),
        "tool_choice": st.sampled_from([{"type": "auto"}, {"type": "none"}]),
        "stop_sequences": st.lists(st.sampled_from(["a", "}", "ü"]), max_size=2),
        "thinking": st.sampled_from([{"type": "adaptive"}, {"type": "disabled"}]),
        "cache_control": st.just({"type": "ephemeral"}),
    },
)


@settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(fields=FIELDS, answer=ANSWER)
async def test_a_conversation_is_answered_or_refused_by_name(
    threads: PrepareThreads, fields: dict[str, Any], answer: str
) -> None:
    found = await asked_both_ways(MESSAGES, threads, fields, answer, contract="explicit")
    if found is None:
        return
    without = ("max_tokens", "stop_sequences")
    counted = {name: value for name, value in fields.items() if name not in without}
    asked = from_count_tokens(json.dumps({"model": "penny", **counted}).encode())
    assert await found.replica.count(asked) == found.usage.prompt_tokens
    message = read_whole(found.whole)
    assert extras(message) == []
    assert said_by(read_stream(found.streamed)) == said_by(message)
