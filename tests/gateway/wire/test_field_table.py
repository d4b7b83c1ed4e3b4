"""docs/fields.md is what the code does: each field that it calls honoured changes the request, each
that it calls ignored does not, and each that it calls refused is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import completion_create_params

from gateway.fleet.errors import BadField
from gateway.wire.field_table import page, rows
from gateway.wire.from_openai import from_openai
from gateway.wire.request import GenerateRequest
from gateway.wire.surfaces import CHAT

PAGE = Path(__file__).resolve().parents[3] / "docs" / "fields.md"
SCHEMA = {"type": "object"}
TOOL = {"type": "function", "function": {"name": "f"}}
TOP = {row.path: row.treatment for row in rows(CHAT) if "." not in row.path}

HONOURED: dict[str, Any] = {
    "prompt_cache_key": "k",
    "model": "other",
    "messages": [{"role": "user", "content": "bye"}],
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "n": 2,
    "temperature": 0,
    "top_p": 0.5,
    "frequency_penalty": 1,
    "presence_penalty": 1,
    "logit_bias": {"5": 1},
    "stop": "x",
    "seed": 1,
    "logprobs": True,
    "stream": True,
    "service_tier": "flex",
    "reasoning_effort": "none",
    "response_format": {"type": "json_object"},
    "top_k": 5,
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "min_tokens": 5,
    "ignore_eos": True,
    "stop_token_ids": [5],
    "include_stop_str_in_output": True,
    "structured_outputs": {"regex": "x"},
    "tools": [TOOL],
    "guided_json": SCHEMA,
    "guided_regex": "x",
    "guided_choice": ["x"],
    "guided_grammar": 'start: "x"',
}
BESIDE: dict[str, tuple[dict[str, Any], Any]] = {
    "top_logprobs": ({"logprobs": True}, 3),
    "tool_choice": ({"tools": [TOOL]}, "required"),
    "parallel_tool_calls": ({"tools": [TOOL]}, False),
    "stream_options": ({"stream": True}, {"include_usage": True}),
}
"""What has a meaning beside others alone: those, and a value."""
ONLY_REFUSES: dict[str, Any] = {"store": False, "modalities": ["text"]}
"""Honoured, with the only value that is taken: what happens anyway."""
IGNORED: dict[str, Any] = {
    "user": "u",
    "safety_identifier": "u",
    "metadata": {"a": "b"},
}


def read(**fields: Any) -> GenerateRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], **fields}
    return from_openai(json.dumps(body).encode(), "engine")


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run: make fields"


def test_every_field_is_tried_here() -> None:
    honoured = {path for path, treatment in TOP.items() if treatment == "honoured"}
    assert honoured == HONOURED.keys() | BESIDE.keys() | ONLY_REFUSES.keys()
    assert {path for path, treatment in TOP.items() if treatment == "ignored"} == IGNORED.keys()


def test_every_field_of_openais_is_known() -> None:
    theirs = completion_create_params.CompletionCreateParamsBase.__annotations__.keys() | {"stream"}
    assert theirs <= TOP.keys()


@pytest.mark.parametrize("name", HONOURED)
def test_what_is_honoured_changes_the_request(name: str) -> None:
    assert read(**{name: HONOURED[name]}) != read()


@pytest.mark.parametrize("name", BESIDE)
def test_what_is_honoured_beside_others_changes_the_request(name: str) -> None:
    others, value = BESIDE[name]
    assert read(**others, **{name: value}) != read(**others)


@pytest.mark.parametrize("name", [*IGNORED, *ONLY_REFUSES])
def test_what_is_ignored_changes_nothing(name: str) -> None:
    assert read(**{name: (IGNORED | ONLY_REFUSES)[name]}) == read()


@pytest.mark.parametrize("name", [path for path, said in TOP.items() if said == "refused"])
def test_what_is_refused_is_refused_by_its_name(name: str) -> None:
    for value in (True, "x", {}, [], 0):
        with pytest.raises(BadField) as caught:
            read(**{name: value})
        assert caught.value.param == name
