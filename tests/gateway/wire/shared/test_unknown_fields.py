"""Unknown fields are left out of a body by their exact place, and nothing else is; all else that is
wrong is still refused."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.generate_request import GenerateRequest
from gateway.request_errors import BadField, UnknownField
from gateway.wire.anthropic.from_anthropic import from_anthropic
from gateway.wire.openai.from_chat import from_openai
from gateway.wire.openai_responses.from_responses import read_response
from gateway.wire.shared.unknown_fields import MAX_IGNORED, known_part, to_ignored_header
from tests.budget import examples

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"odd": 1}}}],
}


def read_chat(body: bytes) -> GenerateRequest:
    return from_openai(body, "engine")


def encode(body: Any) -> bytes:
    return json.dumps(body).encode()


def objects(node: Any, path: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Each object whose fields a struct names, with its path without indices."""
    found = [(path, node)] if isinstance(node, dict) else []
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for name, value in items:
        if isinstance(value, dict | list) and name != "parameters":
            inner = f"{path}[]" if isinstance(name, int) else f"{path}.{name}".removeprefix(".")
            found += objects(value, inner)
    return found


PLACES = range(len(objects(CHAT)))
NAMES = st.sampled_from(["odd", "a.b", "x" * 300, "é", "tool_calls[0]", '"', "]"])


@settings(deadline=None, max_examples=examples(60))
@given(added=st.lists(st.tuples(st.sampled_from(PLACES), NAMES), max_size=6, unique=True))
def test_what_nobody_knows_is_left_out_wherever_it_stands(added: list[tuple[int, str]]) -> None:
    body = json.loads(json.dumps(CHAT))
    places = objects(body)
    for place, name in added:
        places[place][1][name] = {"any": [1]}
    cleaned, ignored = known_part(encode(body), read_chat)
    assert json.loads(cleaned) == CHAT
    paths = {f"{places[place][0]}.{name}".removeprefix(".") for place, name in added}
    assert set(ignored) == paths


def test_a_field_of_another_kind_of_message_stays_where_it_is_known() -> None:
    body = json.loads(json.dumps(CHAT))
    body["messages"][0]["tool_calls"] = []
    cleaned, ignored = known_part(encode(body), read_chat)
    assert (json.loads(cleaned), ignored) == (CHAT, ("messages[].tool_calls",))


def test_one_name_in_a_thousand_messages_is_one_name() -> None:
    messages = [{"role": "user", "content": "x", "odd": n} for n in range(1000)]
    cleaned, ignored = known_part(encode({"model": "m", "messages": messages}), read_chat)
    assert ignored == ("messages[].odd",)
    assert read_chat(cleaned).prompt is not None


def test_too_many_names_are_refused_by_the_next_one() -> None:
    body = {**CHAT, **{f"odd{n}": n for n in range(MAX_IGNORED + 1)}}
    with pytest.raises(UnknownField) as caught:
        known_part(encode(body), read_chat)
    assert caught.value.field == f"odd{MAX_IGNORED}"


def test_what_else_is_wrong_is_left_to_who_reads_it() -> None:
    cleaned, ignored = known_part(encode({**CHAT, "odd": 1, "n": 0}), read_chat)
    with pytest.raises(BadField) as caught:
        read_chat(cleaned)
    assert caught.value.param == "n"
    assert ignored in ((), ("odd",))


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (read_response, {"model": "m", "input": [{"role": "user", "content": "x", "odd": 1}]}),
        (
            partial(from_anthropic, dialect="engine"),
            {
                "model": "m",
                "max_tokens": 5,
                "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
                "thinking": {"type": "disabled", "odd": 1},
            },
        ),
    ],
)
def test_bodies_of_other_surfaces_are_read_alike(read: Any, body: Any) -> None:
    cleaned, [ignored] = known_part(encode({**body, "odd": 1}), read)[0], ("odd",)
    assert ignored == "odd" and "odd" not in cleaned.decode()


def test_the_header_is_one_whatever_the_names_are() -> None:
    assert to_ignored_header(()) == {}
    [(name, value)] = to_ignored_header(["a", "b\r\nset-cookie: x", "ü" * 100]).items()
    assert (name, value) == ("x-tollgate-ignored-fields", f"a, b??set-cookie??x, {'?' * 64}")
