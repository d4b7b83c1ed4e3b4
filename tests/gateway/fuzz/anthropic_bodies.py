"""Draws bodies for Anthropic's surfaces: messages of blocks, and options."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.gateway.fuzz.texts import (
    CACHE,
    DEEP_MARK,
    HELLO,
    MILD_SCHEMA,
    NAME,
    PLAIN,
    SCHEMA,
    TEXT,
    Fields,
    built,
    tools_of,
    without_none,
)

BLOCK = st.one_of(
    built(
        lambda text, kept: without_none(type="text", text=text, cache_control=kept),
        TEXT,
        st.none() | st.none() | CACHE,
    ),
    built(lambda text: {"type": "thinking", "thinking": text, "signature": "s"}, TEXT),
    built(
        lambda id_, name, given: {"type": "tool_use", "id": id_, "name": name, "input": given},
        st.sampled_from(["toolu_1", "toolu_2"]),
        NAME,
        st.sampled_from([{}, {"a": [1, "ü\x00"]}, {"a": DEEP_MARK}, []]),
    ),
    built(
        lambda id_, content, failed: without_none(
            type="tool_result", tool_use_id=id_, content=content, is_error=failed
        ),
        st.sampled_from(["toolu_1", "toolu_2"]),
        st.none() | TEXT | st.lists(built(lambda text: {"type": "text", "text": text}, TEXT)),
        st.none() | st.booleans(),
    ),
    st.sampled_from(
        [
            {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/"}},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "server_tool_use"},
            {"type": "hologram"},
        ]
    ),
)
MESSAGE = built(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from([*("user", "assistant", "user", "system") * 3, "nobody"]),
    PLAIN | TEXT | st.lists(BLOCK, max_size=3),
)
MESSAGES_LOOP = built(
    lambda said, num_calls, result, order: [
        {"role": "user", "content": said},
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": f"t{number}", "name": "f", "input": {"a": number}}
                for number in range(num_calls)
            ],
        },
        {
            "role": "user",
            "content": order(
                [
                    {"type": "tool_result", "tool_use_id": f"t{number}", "content": result}
                    for number in range(num_calls)
                ]
            ),
        },
    ],
    PLAIN,
    st.integers(1, 3),
    TEXT | st.just([{"type": "tool_reference", "tool_name": "f"}]),
    st.sampled_from([list, lambda results: results[::-1], lambda results: results[1:]]),
)
MESSAGES_TOOL = built(
    lambda name, schema, kept: without_none(
        name=name,
        input_schema=schema,
        cache_control=kept,
        defer_loading=True if name == "g" else None,
    ),
    NAME,
    MILD_SCHEMA | SCHEMA,
    st.none() | st.none() | CACHE,
)
CHANGED_TOOLS = [
    {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "f"}},
    {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}},
    {
        "type": "tool_addition",
        "tool": {
            "type": "tool_definition",
            "definition": {"name": "g", "input_schema": {"type": "object"}},
        },
    },
]
CHANGE = built(
    lambda blocks: {"role": "system", "content": blocks},
    st.lists(st.sampled_from(CHANGED_TOOLS), max_size=2),
)
COUNTED: Fields = {
    "system": TEXT | st.lists(built(lambda text: {"type": "text", "text": text}, TEXT), max_size=2),
    "tools": tools_of(MESSAGES_TOOL, lambda tool: str(tool["name"]))
    | st.just([{"type": "bash_20250124", "name": "bash"}]),
    "tool_choice": st.sampled_from(
        [
            *({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}, {"type": "none"}),
            {"type": "auto", "disable_parallel_tool_use": True},
        ]
    ),
    "thinking": st.sampled_from(
        [
            {"type": "adaptive", "display": "omitted"},
            {"type": "disabled"},
            {"type": "enabled", "budget_tokens": 1024},
        ]
    ),
    "output_config": st.sampled_from(
        [{}, {"effort": "low"}, {"format": {"type": "json_schema", "schema": {"type": "object"}}}]
    ),
    "cache_control": CACHE,
    "context_management": st.sampled_from(
        [
            *({}, {"edits": []}, {"edits": [{"type": "x"}]}),
            {"edits": [{"type": "clear_tool_uses_20250919"}, {"type": "clear_thinking_20251015"}]},
        ]
    ),
}
MESSAGES: Fields = {
    **COUNTED,
    "temperature": st.sampled_from([0, 1, 0.5, 1.1]),
    "top_p": st.sampled_from([0, 0.5, 1]),
    "top_k": st.sampled_from([0, 5, -1]),
    "stop_sequences": st.lists(st.sampled_from(["a", "}", "ü", ""]), max_size=2),
    "service_tier": st.sampled_from(["auto", "standard_only", "flex"]),
    "metadata": st.sampled_from([{}, {"user_id": "u"}, {"nobody": 1}]),
    "mcp_servers": st.none() | st.just([]),
}
MESSAGES_MESSAGES = st.one_of(
    HELLO,
    st.lists(MESSAGE, min_size=1, max_size=4),
    built(
        lambda loop, more: loop + more,
        MESSAGES_LOOP,
        st.lists(MESSAGE, max_size=1) | st.lists(CHANGE, max_size=1),
    ),
)
MAX_TOKENS = st.sampled_from([1, 5, 40, 40, 40, 40, 10**9, 0])
