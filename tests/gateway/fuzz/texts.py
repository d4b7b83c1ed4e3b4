"""Texts, numbers, junk, and what requests of several surfaces have in common: schemas, tools,
sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import strategies as st

Strategy = st.SearchStrategy[Any]
Fields = Mapping[str, Strategy]

WORDS = (
    *("", "a", "Hello, who are you?", "two\nlines\r\n", "\x00", "\x7f", "\u200d", "\ufeff"),
    *("😀👩\u200d👩\u200d👧", "e\u0301", "\u202eabc", "\u2028", "ü" * 40, "\ud800", "x\udc00y"),
    *("<|im_end|>", "<|im_start|>system\n", "<tool_call>", "<think>", "</think>", "{{ 7 * 7 }}"),
    *("{% for x in y %}", "data: [DONE]\n\n", '"}], "', "\\", "\\ud800", "' OR 1=1 --", "a" * 700),
    *("word " * 3000, " ", "\t", "𝕏" * 20),
)
TEXT = st.one_of(
    st.sampled_from(WORDS[:3]),
    st.lists(st.sampled_from(WORDS), max_size=3).map("".join),
    st.text(st.characters(), max_size=12),
)
PLAIN = st.sampled_from(["a", "Hello, who are you?", "Tell me of bridges.", "ü 😀"])
NAME = st.sampled_from(["f", "g", "look_at", "über", 'quo"ted', "n" * 128])
ODD_NUMBERS = (0, -1, 1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 0.5, -0.0, 1e308, 1e-320)
DEEP_MARK, LARGE_MARK, HUGE_MARK = "mark:deep", "mark:large", "mark:huge"
RAW_MARKS = {
    f'"{DEEP_MARK}"'.encode(): b"[" * 3000 + b"]" * 3000,
    f'"{LARGE_MARK}"'.encode(): b'{"a":' * 700 + b"1" + b"}" * 700,
    f'"{HUGE_MARK}"'.encode(): b"1e999",
}
"""Bytes that `json` cannot write; a mark stands for them until the body is encoded."""
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(ODD_NUMBERS),
    TEXT,
    st.sampled_from([DEEP_MARK, LARGE_MARK, HUGE_MARK]),
    st.sampled_from([[], {}, [[]], [None], {"type": "text"}, {"type": "image_url"}, {"": {}}]),
    st.recursive(
        st.none() | st.integers() | TEXT,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
        max_leaves=5,
    ),
)


def built(make: Callable[..., Any], *parts: Strategy) -> Strategy:
    return st.builds(make, *parts)


def without_none(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


# ---- tools and forms

SCHEMAS: tuple[Any, ...] = (
    {},
    {"type": "object"},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "object", "properties": {"ü\x00": {"enum": ["x", None, 1.5]}}},
    {"type": "object", "$ref": "#/$defs/self", "$defs": {"self": {"$ref": "#/$defs/self"}}},
    {"type": "object", "patternProperties": {"^(a+)+$": {"type": "string", "pattern": "(x*)*"}}},
    {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"type": "object", "properties": {"a": DEEP_MARK}},
    {"type": "object", "properties": {"a": {"type": "array", "minItems": 10**9}}},
    {"type": "string"},
    {"type": ["object", "null"]},
    {"$schema": "http://json-schema.org/draft-07/schema#", "$id": "file:///etc/passwd"},
)
SCHEMA = st.sampled_from(SCHEMAS)
MILD_SCHEMA = st.sampled_from(SCHEMAS[:3])
ARGUMENTS = st.sampled_from(
    ["", "{}", '{"a": [1, "ü"]}', "broken {", "[1]", "null", '{"a": 1e999}']
)
FUNCTION = built(
    lambda name, schema, strict: without_none(
        name=name, description="x", parameters=schema, strict=strict
    ),
    NAME,
    st.none() | MILD_SCHEMA | SCHEMA,
    st.none() | st.just(False),
)


def tools_of(tool: Strategy, name_of: Callable[[Any], str]) -> Strategy:
    few = st.lists(tool, max_size=3, unique_by=name_of)
    return st.one_of(few, few, st.lists(tool, min_size=2, max_size=3))


FORM_TYPES = ("text", "json_object", "structural_tag", "xml")
STOP = st.sampled_from(["a", ["}", "ü"], [], ["e", " ", "\n"], "", "x" * 1025, ["a"] * 17])
SEED = st.sampled_from([0, 7, -1, 2**63 - 1])
BIASES: tuple[Any, ...] = ({}, {"5": -100}, {"5": 100, "6": 0.5}, {"999999": 1}, {"a": 1})
SAMPLING: Fields = {
    "temperature": st.sampled_from([0, 1, 2, 0.3, 2.1]),
    "top_p": st.sampled_from([0, 0.5, 1, 1e-320]),
    "seed": SEED,
    "stop": STOP,
    "top_k": st.sampled_from([-1, 0, 5, 2**63 - 1, -2]),
    "min_p": st.sampled_from([0, 0.5, 1]),
    "user": st.just("u") | TEXT,
}
SAMPLING_OF_CHAT: Fields = {
    **SAMPLING,
    "n": st.sampled_from([1, 2, 3, 128, 0, 129]),
    "frequency_penalty": st.sampled_from([0, 2, -2, 3]),
    "presence_penalty": st.sampled_from([0, 2, -2]),
    "repetition_penalty": st.sampled_from([1, 0.01, 100, 0]),
    "logit_bias": st.sampled_from(BIASES),
    "min_tokens": st.sampled_from([0, 1, 5, 600]),
    "ignore_eos": st.booleans(),
    "stop_token_ids": st.sampled_from([[], [5], [4095], [4096], [-1], [5] * 129]),
    "include_stop_str_in_output": st.booleans(),
}
TIER = st.sampled_from(["auto", "default", "flex", "priority", "scale", "gold"])
METADATA = st.sampled_from([{}, {"a": "b"}, {"a" * 65: "b"}, {"a": 1}, {"\x00": "\ud800"}])
EFFORT = st.sampled_from(["none", "minimal", "low", "high", "much"])
CACHE = st.sampled_from([{"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}, {"type": "x"}])
HELLO = st.just([{"role": "user", "content": "Hello, who are you?"}])
