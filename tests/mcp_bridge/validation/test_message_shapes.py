"""The shapes of results, answers and definitions are those of the protocol, no more and no less."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mcp_types import methods
from pydantic import ValidationError

from mcp_bridge.canonical_json import walk
from mcp_bridge.validation.message_shapes import (
    answer_problem,
    definition_problem,
    method_answered,
    result_problem,
)
from tests.budget import examples

TEXT = {"type": "text", "text": "a"}
IMAGE = {"type": "image", "data": "aGk=", "mimeType": "image/svg+xml"}
AUDIO = {"type": "audio", "data": "", "mimeType": "audio/ogg; codecs=opus"}
LINK = {"type": "resource_link", "uri": "file:///tmp/ä", "name": "a", "size": 3}
BLOB = {"type": "resource", "resource": {"uri": "urn:a", "blob": "aGk=", "mimeType": "text/html"}}
NOTE = {"audience": ["user"], "priority": 0.5, "lastModified": "2026-01-01T00:00:00Z"}
GOOD: list[dict[str, Any]] = [
    TEXT, IMAGE, AUDIO, LINK, BLOB, {**TEXT, "annotations": NOTE, "_meta": {}, "more": [1]},
]  # fmt: skip
BAD: list[tuple[str, Any]] = [
    ("/type", {"type": "bogus", "text": "a"}),
    ("", {"text": "a"}),
    ("", "text"),
    ("/text", {**TEXT, "text": 5}),
    ("", {"type": "text"}),
    ("/mimeType", {**IMAGE, "mimeType": "text/html"}),
    ("/mimeType", {**IMAGE, "mimeType": "image/png\nx"}),
    ("/mimeType", {**AUDIO, "mimeType": "image/png"}),
    ("/data", {**IMAGE, "data": "aGk"}),
    ("/data", {**IMAGE, "data": "a-_="}),
    ("/data", {**IMAGE, "data": "aG\nk="}),
    ("/data", {**IMAGE, "data": "ä"}),
    ("/uri", {**LINK, "uri": "no scheme"}),
    ("/uri", {**LINK, "uri": "JavaScript:alert(1)"}),
    ("/uri", {**LINK, "uri": "http://a/\x1b[0m"}),
    ("/uri", {**LINK, "uri": "a:" + "b" * 10_000}),
    ("", {key: value for key, value in LINK.items() if key != "name"}),
    ("/resource", {"type": "resource", "resource": {"uri": "urn:a"}}),
    ("/resource", {"type": "resource", "resource": {"uri": "urn:a", "text": "", "blob": ""}}),
    ("/resource/blob", {"type": "resource", "resource": {"uri": "urn:a", "blob": "?"}}),
    ("/annotations", {**TEXT, "annotations": 5}),
    ("/annotations/priority", {**TEXT, "annotations": {"priority": 2}}),
    ("/annotations/audience/1", {**TEXT, "annotations": {"audience": ["user", "root"]}}),
    ("/annotations/lastModified", {**TEXT, "annotations": {"lastModified": 5}}),
    ("/_meta", {**TEXT, "_meta": []}),
]


@pytest.mark.parametrize("modern", [True, False])
def test_content_is_what_the_protocol_has(modern: bool) -> None:
    assert result_problem("tools/call", {"content": GOOD}, modern=modern) is None
    for place, part in BAD:
        found = result_problem("tools/call", {"content": [TEXT, part]}, modern=modern)
        assert found is not None and found.path == f"/content/1{place}", part
        assert "alert" not in found.message and "bogus" not in found.message
        message = {"messages": [{"role": "user", "content": part}]}
        found = result_problem("prompts/get", message, modern=modern)
        assert found is not None and found.path == f"/messages/0/content{place}", part


@pytest.mark.parametrize(
    ("method", "result", "place"),
    [
        ("tools/call", {}, ""),
        ("tools/call", {"content": None}, "/content"),
        ("tools/call", {"content": [], "isError": "no"}, "/isError"),
        ("prompts/get", {}, ""),
        ("prompts/get", {"messages": [{"role": "system", "content": TEXT}]}, "/messages/0/role"),
        ("resources/read", {}, ""),
        ("resources/read", {"contents": [{"uri": "a:b"}]}, "/contents/0"),
        ("resources/read", {"contents": [{"uri": "a:b", "blob": "x"}]}, "/contents/0/blob"),
        ("resources/read", {"contents": [{"text": "x"}]}, "/contents/0"),
        ("completion/complete", {"completion": {"values": [1]}}, "/completion/values/0"),
        ("completion/complete", {"completion": {"values": ["a"] * 101}}, "/completion/values"),
    ],
)
def test_a_result_is_what_its_request_has(method: str, result: Any, place: str) -> None:
    for modern in (True, False):
        found = result_problem(method, result, modern=modern)
        assert found is not None and found.path == place


def test_only_the_newer_era_has_structured_content_that_is_no_object() -> None:
    result = {"content": [], "structuredContent": [1]}
    assert result_problem("tools/call", result, modern=True) is None
    assert result_problem("tools/call", result, modern=False) is not None


@pytest.mark.parametrize(
    ("method", "answer", "place"),
    [
        ("sampling/createMessage", {"role": "assistant", "model": "m", "content": TEXT}, None),
        ("sampling/createMessage", {"role": "assistant", "model": "m", "content": [IMAGE]}, None),
        ("sampling/createMessage", {"role": "assistant", "content": TEXT}, ""),
        (
            "sampling/createMessage",
            {"role": "assistant", "model": "m", "content": [{**IMAGE, "data": "x"}]},
            "/content/0/data",
        ),
        ("elicitation/create", {"action": "accept", "content": {"a": ["b"], "c": 1.5}}, None),
        ("elicitation/create", {"action": "perhaps"}, "/action"),
        ("elicitation/create", {"action": "accept", "content": {"a": {}}}, "/content/..."),
        ("roots/list", {"roots": [{"uri": "file:///a"}]}, None),
        ("roots/list", {"roots": [{"uri": "a b"}]}, "/roots/0/uri"),
    ],
)
def test_an_answer_of_a_client_is_what_was_asked(method: str, answer: Any, place: Any) -> None:
    found = answer_problem(method, answer)
    assert (None if found is None else found.path) == place
    assert method_answered(answer) == method


@pytest.mark.parametrize(
    ("kind", "thing", "place"),
    [
        ("tool", {"name": "a", "inputSchema": {"type": "object"}, "x": 1}, None),
        ("tool", {"name": "a", "description": ["b"]}, "/description"),
        ("tool", {"name": "a", "annotations": {"readOnlyHint": 1}}, "/annotations/readOnlyHint"),
        ("tool", {"name": "a", "icons": [{}]}, "/icons/0"),
        ("tool", {"name": "a", "_meta": {"own": 1, "io.x/tollgate": 1}}, None),
        ("tool", {"name": "a", "_meta": {"tollgate/provenance": {}}}, "/_meta/tollgate/provenance"),
        ("prompt", {"name": "a", "arguments": [{"name": "b", "required": 1}]},
         "/arguments/0/required"),
        ("resource", {"uri": "a:b", "name": "c"}, None),
        ("resource", {"uri": "a b", "name": "c"}, "/uri"),
        ("resource_template", {"uriTemplate": "a:{b}", "name": "c", "annotations": []},
         "/annotations"),
    ],
)  # fmt: skip
def test_a_definition_is_what_its_kind_has(kind: Any, thing: Any, place: Any) -> None:
    found = definition_problem(kind, thing)
    assert (None if found is None else found.path) == place


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data(), modern=st.booleans())
def test_nothing_passes_that_the_official_types_refuse(data: st.DataObject, modern: bool) -> None:
    """A result with another value at some place: the SDK's own reading of it is no stricter."""
    result: dict[str, Any] = {"content": copy.deepcopy(GOOD), "resultType": "complete"}
    places = [parts for parts, _ in walk(result) if parts and parts[0] == "content"]
    parts = data.draw(st.sampled_from(places))
    holder: Any = result
    for part in parts[:-1]:
        holder = holder[part]
    holder[parts[-1]] = data.draw(
        st.sampled_from([None, True, 0, 1.5, "", "text", "a:b", "aGk=", [], {}, [{}], "image/png"])
    )
    version = "2026-07-28" if modern else "2025-11-25"
    try:
        methods.validate_server_result("tools/call", version, result)
        passes = True
    except ValidationError:
        passes = False
    if result_problem("tools/call", result, modern=modern) is None:
        assert passes, msgspec.json.encode(result)
