"""Draws bodies for OpenAI's surfaces: conversations, plain prompts, items of responses, options."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.gateway.fuzz.texts import (
    ARGUMENTS,
    CACHE,
    EFFORT,
    FORM_TYPES,
    FUNCTION,
    HELLO,
    METADATA,
    NAME,
    PLAIN,
    SAMPLING,
    SAMPLING_OF_CHAT,
    SCHEMA,
    TEXT,
    TIER,
    Fields,
    built,
    tools_of,
    without_none,
)

PREVIOUS, CONVERSATION, CALLED = "resp_the_last_one", "conv_the_only_one", "call_of_the_last_one"
"""Placeholders for a response, a conversation and a call of that response that the test stored
before."""

# ---- chat

TEXT_PART = built(
    lambda text, kept: without_none(type="text", text=text, cache_control=kept),
    TEXT,
    st.none() | st.none() | CACHE,
)
UNKNOWN_PARTS: tuple[Any, ...] = (
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
    {"type": "file", "file": {"file_id": "file-1"}},
    {"type": "hologram"},
    {"text": "typeless"},
)
CONTENT = st.one_of(PLAIN, TEXT, st.lists(TEXT_PART, max_size=3))
ODD_CONTENT = st.one_of(CONTENT, st.lists(TEXT_PART | st.sampled_from(UNKNOWN_PARTS), max_size=2))
CALL = built(
    lambda id_, name, arguments: {
        "id": id_,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    },
    st.sampled_from(["call_1", "call_2", "x" * 128]),
    NAME,
    ARGUMENTS,
)
CHAT_MESSAGE = st.one_of(
    built(lambda text: {"role": "user", "content": text}, CONTENT),
    built(
        lambda role, content, name: without_none(role=role, content=content, name=name),
        st.sampled_from([*("system", "developer", "user", "assistant") * 3, "function"]),
        ODD_CONTENT,
        st.none() | NAME,
    ),
    built(
        lambda content, calls, thought: without_none(
            role="assistant", content=content, tool_calls=calls, reasoning_content=thought
        ),
        st.none() | TEXT,
        st.lists(CALL, min_size=1, max_size=2) | st.sampled_from([None, []]),
        st.none() | TEXT,
    ),
    built(
        lambda content, id_: {"role": "tool", "tool_call_id": id_, "content": content},
        CONTENT,
        st.sampled_from(["call_1", "call_2", ""]),
    ),
)
CHAT_LOOP = built(
    lambda said, calls, results, order: [
        {"role": "user", "content": said},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *order(
            [
                {"role": "tool", "tool_call_id": call["id"], "content": result}
                for call, result in zip(calls, results, strict=False)
            ]
        ),
    ],
    PLAIN,
    st.lists(CALL, min_size=1, max_size=2, unique_by=lambda call: call["id"]),
    st.lists(TEXT, min_size=1, max_size=2),
    st.sampled_from([list, lambda results: results[::-1], lambda results: results * 2]),
)
CHAT_MESSAGES = st.one_of(
    HELLO,
    st.lists(CHAT_MESSAGE, min_size=1, max_size=4),
    built(lambda loop, more: loop + more, CHAT_LOOP, st.lists(CHAT_MESSAGE, max_size=2)),
    built(lambda size: [{"role": "user", "content": "a"}] * size, st.sampled_from([0, 40, 10_001])),
)
CHAT_TOOL = built(lambda function: {"type": "function", "function": function}, FUNCTION)
NAMED = {"type": "function", "function": {"name": "f"}}
VLLMS: Fields = {
    "skip_special_tokens": st.booleans(),
    "prompt_logprobs": st.sampled_from([*[None] * 6, 0, 2]),
    "logprob_token_ids": st.sampled_from([*[None] * 7, [5, 5, 4095]]),
    "return_token_ids": st.booleans(),
    "return_tokens_as_token_ids": st.booleans(),
    "priority": st.sampled_from([0, 1, -(2**31) + 1]),
}
STREAM_OPTIONS = (
    {},
    {"include_usage": True},
    {"include_usage": True, "continuous_usage_stats": True},
    {"continuous_usage_stats": True},
    {"include_obfuscation": True},
)
CHAT: Fields = {
    **SAMPLING_OF_CHAT,
    **VLLMS,
    "echo": st.booleans(),
    "add_generation_prompt": st.none() | st.booleans(),
    "continue_final_message": st.sampled_from([*[None, False] * 5, True]),
    "chat_template_kwargs": st.sampled_from(
        [None, {}, {"enable_thinking": False}, {"a": [{}] * 40}]
    ),
    "max_tokens": st.sampled_from([1, 5, 40, 10**9, 0]),
    "max_completion_tokens": st.sampled_from([1, 5, 40]),
    "logprobs": st.booleans(),
    "top_logprobs": st.sampled_from([0, 3, 20, 21]),
    "stream_options": st.sampled_from(STREAM_OPTIONS),
    "tools": tools_of(CHAT_TOOL, lambda tool: str(tool["function"]["name"])),
    "tool_choice": st.sampled_from(
        [
            *("auto", "none", "required", "some"),
            *(NAMED, {"type": "function", "function": {"name": "nobody"}}, {"type": "custom"}),
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
        ]
    ),
    "parallel_tool_calls": st.booleans(),
    "functions": st.sampled_from([None] * 6 + [[], [{"name": "f"}]]),
    "function_call": st.sampled_from([*[None] * 6, "auto", {"name": "f"}]),
    "response_format": built(lambda kind: {"type": kind}, st.sampled_from(FORM_TYPES))
    | built(lambda schema: {"type": "json_schema", "json_schema": schema}, st.just({}))
    | built(
        lambda schema: {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        SCHEMA,
    ),
    "structured_outputs": st.sampled_from(
        [{}, {"regex": "[0-9]+("}, {"choice": ["a", "b"]}, {"json_object": True}, {"grammar": "x"}]
    ),
    "guided_json": SCHEMA | TEXT,
    "guided_regex": TEXT,
    "modalities": st.sampled_from([["text"], ["audio"], []]),
    "service_tier": TIER,
    "store": st.booleans(),
    "reasoning_effort": EFFORT,
    "metadata": METADATA,
    "prompt_cache_key": st.just("k") | TEXT,
    "reasoning": st.none() | built(lambda effort: {"effort": effort}, EFFORT) | st.just({"a": 1}),
    "verbosity": st.sampled_from([None, "medium", "low"]),
    "prediction": st.none() | st.just({}),
}

# ---- plain prompts

IDS = st.lists(st.sampled_from([5, 6, 7, 4095, 4096, 2**40]), max_size=4)
PROMPT = st.one_of(
    PLAIN,
    TEXT,
    st.lists(PLAIN, max_size=3),
    st.lists(TEXT, max_size=3),
    st.lists(st.sampled_from([5, 6, 7]), min_size=1, max_size=5),
    IDS,
    st.lists(IDS, max_size=3),
    built(lambda size: ["a"] * size, st.sampled_from([128, 129, 2048, 2049])),
    st.sampled_from([["a", 5], [5, "a"], [[5], "a"], [["a"]], {}, 5]),
)
COMPLETION: Fields = {
    **SAMPLING_OF_CHAT,
    **VLLMS,
    "max_tokens": st.sampled_from([0, 1, 5, 40, 10**9]),
    "echo": st.booleans(),
    "logprobs": st.sampled_from([0, 2, 20, 21]),
    "best_of": st.sampled_from([1, 2]),
    "suffix": st.none() | st.just("b"),
    "stream_options": st.sampled_from(STREAM_OPTIONS[:4]),
}
EMBEDDING: Fields = {
    "encoding_format": st.sampled_from(["float", "base64", "base64", "hex"]),
    "dimensions": st.sampled_from([1, 4, 16, 17, 0]),
    "user": TEXT,
}
TOKENIZED: Fields = {
    "add_special_tokens": st.booleans(),
    "return_token_strs": st.booleans(),
    "add_generation_prompt": st.none() | st.booleans(),
}

# ---- responses

ITEM_TEXT = built(
    lambda kind, text: {"type": kind, "text": text},
    st.sampled_from(["input_text", "output_text"]),
    TEXT,
)
UNKNOWN_ITEMS: tuple[Any, ...] = (
    {"type": "web_search_call", "id": "ws_1"},
    {"type": "item_reference", "id": "msg_nobody"},
    {"id": "msg_nobody"},
    {"type": "hologram"},
    {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
    {"type": "compaction", "encrypted_content": "x.eA=="},
    {"type": "reasoning", "summary": [], "encrypted_content": ""},
    {"type": "custom_tool_call", "call_id": "call_1", "name": "f", "input": "\x00"},
    {"type": "local_shell_call_output", "output": "x"},
    {"type": "additional_tools", "role": "developer", "tools": [{"type": "custom", "name": "h"}]},
)
MESSAGE_ITEM = {"role": "user", "content": "hi"}
ITEM = st.one_of(
    built(
        lambda text: {"role": "user", "content": text}, CONTENT.filter(lambda c: isinstance(c, str))
    ),
    built(
        lambda role, content, id_: without_none(type="message", role=role, content=content, id=id_),
        st.sampled_from([*("user", "assistant", "system", "developer") * 3, "nobody"]),
        TEXT | st.lists(ITEM_TEXT, max_size=3),
        st.sampled_from([None, None, "msg_1", "x" * 129]),
    ),
    built(
        lambda id_, name, arguments: {
            "type": "function_call",
            "call_id": id_,
            "name": name,
            "arguments": arguments,
        },
        st.sampled_from(["call_1", "call_2"]),
        NAME,
        ARGUMENTS,
    ),
    built(
        lambda id_, output: {"type": "function_call_output", "call_id": id_, "output": output},
        st.sampled_from(["call_1", "call_2", CALLED]),
        TEXT | st.lists(built(lambda text: {"type": "input_text", "text": text}, TEXT), max_size=2),
    ),
    built(
        lambda text, summary: {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": summary}],
            "content": [{"type": "reasoning_text", "text": text}],
        },
        TEXT,
        TEXT,
    ),
    st.sampled_from(UNKNOWN_ITEMS),
)
ITEMS = st.lists(ITEM, max_size=3) | st.lists(st.just(MESSAGE_ITEM), max_size=21)
RESPONSE_TOOL = built(lambda function: {"type": "function", **function}, FUNCTION)
NAMED_FUNCTION = {"type": "function", "name": "f"}
FREE_TEXT = {"type": "custom", "name": "f"}
AGENT_TOOLS: list[list[Any]] = [
    [FREE_TEXT],
    [{**FREE_TEXT, "format": {"type": "grammar", "syntax": "lark", "definition": "start: ("}}],
    [{"type": "namespace", "name": "ns", "description": "", "tools": [NAMED_FUNCTION, FREE_TEXT]}],
    [NAMED_FUNCTION, {"type": "web_search", "anything": 1}],
]
RESPONSE: Fields = {
    **SAMPLING,
    "instructions": TEXT,
    "max_output_tokens": st.sampled_from([1, 5, 40, 10**9, 0]),
    "max_tool_calls": st.sampled_from([1, 0]),
    "tools": tools_of(RESPONSE_TOOL, lambda tool: str(tool["name"])) | st.sampled_from(AGENT_TOOLS),
    "tool_choice": st.sampled_from(
        [
            *("auto", "none", "required", NAMED_FUNCTION, {"type": "web_search_preview"}),
            {"type": "custom", "name": "f"},
            {"type": "allowed_tools", "mode": "auto", "tools": [NAMED_FUNCTION]},
        ]
    ),
    "parallel_tool_calls": st.booleans(),
    "text": st.sampled_from(
        [{}, {"format": {"type": "text"}}, {"verbosity": "medium"}, {"verbosity": "low"}]
    )
    | built(
        lambda schema: {"format": {"type": "json_schema", "name": "x", "schema": schema}}, SCHEMA
    ),
    "reasoning": st.sampled_from([{}, {"effort": "none"}, {"effort": "low", "summary": "auto"}]),
    "top_logprobs": st.sampled_from([0, 3, 21]),
    "include": st.sampled_from(
        [[], ["message.output_text.logprobs"], ["reasoning.encrypted_content"], ["nothing"]]
    ),
    "stream_options": st.sampled_from([{}, {"include_obfuscation": False}]),
    "truncation": st.sampled_from(["disabled", "auto"]),
    "service_tier": TIER,
    "store": st.booleans(),
    "background": st.sampled_from([False, False, True]),
    "previous_response_id": st.sampled_from([PREVIOUS, PREVIOUS, "resp_nobody", ""]),
    "conversation": st.sampled_from([CONVERSATION, {"id": CONVERSATION}, "conv_nobody"]),
    "metadata": METADATA,
    "prompt_cache_key": TEXT,
}
RESPONSE_LOOP = built(
    lambda arguments, output, more: [
        {"role": "user", "content": "Look at it."},
        {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": arguments},
        {"type": "function_call_output", "call_id": "call_1", "output": output},
        *more,
    ],
    ARGUMENTS,
    TEXT,
    st.lists(ITEM, max_size=1),
)
INPUT = st.one_of(PLAIN, PLAIN, TEXT, st.lists(ITEM, max_size=4), RESPONSE_LOOP)
