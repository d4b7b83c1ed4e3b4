"""What docs/fields.md says of Anthropic's messages is what the code does: of the fields at the top
each honoured one changes the request, and each refused one is refused by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.fleet.errors import BadField
from gateway.wire.field_table import rows
from gateway.wire.from_anthropic import from_anthropic
from gateway.wire.request import GenerateRequest
from gateway.wire.surfaces import MESSAGES

TOP = {row.path: row.treatment for row in rows(MESSAGES) if "." not in row.path}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
SCHEMA = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
HONOURED: dict[str, Any] = {
    "model": "other",
    "messages": [{"role": "user", "content": "bye"}],
    "system": "Be kind.",
    "max_tokens": 5,
    "temperature": 0,
    "top_p": 0.5,
    "top_k": 5,
    "stop_sequences": ["x"],
    "stream": True,
    "tools": [TOOL],
    "thinking": {"type": "disabled"},
    "output_config": SCHEMA,
    "cache_control": {"type": "ephemeral"},
    "service_tier": "standard_only",
}
BESIDE: dict[str, tuple[dict[str, Any], Any]] = {
    "tool_choice": ({"tools": [TOOL]}, {"type": "any"}),
}
"""What has a meaning beside others alone: those, and a value."""
SAME: dict[str, Any] = {
    "metadata": {"user_id": "u"},
    "speed": "standard",
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}
"""Ignored, or honoured with the only value that is taken: what happens anyway."""


def read(**fields: Any) -> GenerateRequest:
    said = [{"role": "user", "content": "hello"}]
    body = {"model": "m", "max_tokens": 2000, "messages": said, **fields}
    return from_anthropic(json.dumps(body).encode(), "engine")


def test_every_field_is_tried_here() -> None:
    taken = {path for path, treatment in TOP.items() if treatment != "refused"}
    assert taken == HONOURED.keys() | BESIDE.keys() | SAME.keys()


@pytest.mark.parametrize("name", HONOURED)
def test_what_is_honoured_changes_the_request(name: str) -> None:
    assert read(**{name: HONOURED[name]}) != read()


@pytest.mark.parametrize("name", BESIDE)
def test_what_is_honoured_beside_others_changes_the_request(name: str) -> None:
    others, value = BESIDE[name]
    assert read(**others, **{name: value}) != read(**others)


@pytest.mark.parametrize("name", SAME)
def test_what_is_ignored_changes_nothing(name: str) -> None:
    assert read(**{name: SAME[name]}) == read()


@pytest.mark.parametrize("name", [path for path, said in TOP.items() if said == "refused"])
def test_what_is_refused_is_refused_by_its_name(name: str) -> None:
    for value in (True, "x", {}, [], 0):
        with pytest.raises(BadField) as caught:
            read(**{name: value})
        assert caught.value.param == name
