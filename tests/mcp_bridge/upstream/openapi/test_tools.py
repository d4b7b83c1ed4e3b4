"""Documents become tools, within bounds, or are refused by the place that is wrong."""

from __future__ import annotations

import copy
import json
from typing import Any

import jsonschema_rs
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from mcp_types import Tool

from mcp_bridge.upstream.openapi import document as bounds
from mcp_bridge.upstream.openapi.errors import BadDocument
from mcp_bridge.upstream.openapi.tools import OpenApiTools
from tests.mcp_bridge.upstream.openapi.documents import PETS_30, asking, document

BASE = "https://api.example/v1/"


def made(root: object, base_url: str = BASE) -> OpenApiTools:
    return OpenApiTools("pets", json.dumps(root).encode(), base_url)


def tools_of(root: object) -> dict[str, Tool]:
    return {tool.name: tool for tool in made(root).tools}


def test_operations_become_tools() -> None:
    tools = tools_of(PETS_30)
    assert set(tools) == {"pets_list", "addPet", "getPet", "putPet", "delete_pets_petId"}
    listing = tools["pets_list"]
    assert (listing.title, listing.description) == ("All pets", "All pets")
    assert listing.input_schema == {
        "type": "object",
        "properties": {
            "X-Trace": {"type": "string"},
            "tags": {"type": "array", "items": {}},
            "limit": {"type": "integer", "exclusiveMinimum": 0, "description": "How many"},
        },
        "additionalProperties": False,
    }
    assert tools["getPet"].input_schema["required"] == ["petId"]
    assert tools["getPet"].output_schema is None
    assert [each.operation for each in made(PETS_30).left_out] == ["PATCH /pets/{petId}"]
    assert "only JSON, forms and plain text" in made(PETS_30).left_out[0].reason


def test_methods_say_what_they_promise() -> None:
    tools = tools_of(PETS_30)
    said = {name: tool.annotations for name, tool in tools.items()}
    assert all(each is not None for each in said.values())
    assert [name for name, each in said.items() if each and each.read_only_hint] == [
        "pets_list",
        "getPet",
    ]
    assert [name for name, each in said.items() if each and each.destructive_hint] == [
        "delete_pets_petId"
    ]
    idempotent = {name for name, each in said.items() if each and each.idempotent_hint}
    assert idempotent == set(tools) - {"addPet"}


def test_schemas_stand_on_their_own_and_hide_what_is_for_the_other_direction() -> None:
    tool = tools_of(PETS_30)["addPet"]
    pet = tool.input_schema["$defs"]["Pet"]
    assert tool.input_schema["properties"]["body"] == {
        "$ref": "#/$defs/Pet",
        "description": "The pet",
    }
    assert tool.input_schema["required"] == ["body"]
    assert pet == {
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"type": ["string", "null"]},
            "password": {"type": "string"},
            "mother": {"$ref": "#/$defs/Pet"},
            "$ref": {"type": "string", "enum": ["a", {"$ref": "#/x"}]},
        },
    }
    assert tool.output_schema is not None
    assert set(tool.output_schema["properties"]) == {"id", "name", "mother", "$ref"}
    assert tool.output_schema["required"] == ["id", "name"]
    validator = jsonschema_rs.Draft202012Validator(tool.input_schema)
    assert validator.is_valid({"body": {"name": None, "mother": {"name": "x"}}})
    assert not validator.is_valid({"body": {"name": "a", "mother": {"name": 1}}})
    listed = tools_of(PETS_30)["pets_list"].output_schema
    assert listed is not None and listed["required"] == ["result"]


def test_yaml_says_the_same() -> None:
    text = yaml.safe_dump(PETS_30, sort_keys=False).replace("'200':", "200:")
    assert "200:" in text and "'200'" not in text
    plain = OpenApiTools("pets", text.encode(), BASE)
    assert list(plain.tools) == list(made(PETS_30).tools)


def test_a_date_in_yaml_is_a_string() -> None:
    text = b"openapi: 3.1.0\npaths: {/x: {get: {summary: 2020-01-01, responses: {}}}}"
    assert OpenApiTools("x", text, BASE).tools[0].description == "2020-01-01"


def test_names_are_legal_stable_and_never_the_same() -> None:
    paths: dict[str, Any] = {
        f"/{name}": {"get": {"operationId": operation_id, "responses": {}}}
        for name, operation_id in (("a", "do it"), ("b", "do/it"), ("c", "x" * 200), ("d", "fine"))
    }
    paths["/e"] = {"get": {"responses": {}}, "post": {"operationId": "??", "responses": {}}}
    names = [tool.name for tool in made(document(paths)).tools]
    assert len(set(names)) == len(names) == 6
    assert {"fine", "get_e", "post"} <= set(names)
    assert all(len(name) <= 64 and name.replace("_", "").isalnum() for name in names)
    turned = [tool.name for tool in made(document(dict(reversed(paths.items())))).tools]
    assert sorted(turned) == sorted(names)
    del paths["/b"]
    assert "do_it" in [tool.name for tool in made(document(paths)).tools]


def test_names_of_one_name_in_two_places_are_told_apart() -> None:
    tool = tools_of(
        asking(
            {"name": "id", "in": "path", "schema": {"type": "string"}},
            {"name": "id", "in": "query", "schema": {"type": "string"}},
            {"name": "body", "in": "query", "schema": {"type": "string"}},
            path="/x/{id}",
        )
    )["ask"]
    assert set(tool.input_schema["properties"]) == {"id__path", "id__query", "body__query"}


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("https://evil.example/schema.json", "no other is followed"),
        ("file:///etc/passwd", "no other is followed"),
        ("other.json#/x", "no other is followed"),
        ("#anchor", "no other is followed"),
        (7, "no other is followed"),
        ("#/components/schemas/Nothing", "a reference to nothing"),
        ("#/servers/" + "9" * 5000, "a reference to nothing"),
    ],
)
def test_no_reference_leads_out_of_the_document(reference: object, text: str) -> None:
    for part in (
        asking({"name": "q", "in": "query", "schema": {"items": {"$ref": reference}}}),
        asking({"$ref": reference}),
        asking(requestBody={"$ref": reference}, method="post"),
    ):
        upstream = made(part)
        assert upstream.tools == []
        assert text in upstream.left_out[0].reason
    with pytest.raises(BadDocument, match=text):
        made(document({"/x": {"$ref": reference}}))


def test_references_in_a_circle_end() -> None:
    circle = {
        "A": {"$ref": "#/components/parameters/B"},
        "B": {"$ref": "#/components/parameters/A"},
    }
    root = asking({"$ref": "#/components/parameters/A"})
    root["components"] = {"parameters": circle}
    assert "more than 16 references in a row" in made(root).left_out[0].reason


def test_a_schema_bomb_stays_as_small_as_it_was_written() -> None:
    """Each refers twice to the next: written out it would be 2^60."""
    schemas: dict[str, Any] = {
        f"S{n}": {"properties": {k: {"$ref": f"#/components/schemas/S{n + 1}"} for k in "ab"}}
        for n in range(60)
    }
    schemas["S60"] = {"type": "string"}
    root = asking({"name": "q", "in": "query", "schema": {"$ref": "#/components/schemas/S0"}})
    root["components"] = {"schemas": schemas}
    schema = tools_of(root)["ask"].input_schema
    assert len(json.dumps(schema)) < 10_000
    jsonschema_rs.Draft202012Validator(schema)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_too_much_is_refused() -> None:
    for schema in (nested(60), {"properties": {str(n): {} for n in range(6000)}}):
        upstream = made(asking({"name": "q", "in": "query", "schema": schema}))
        assert "too many or too deep" in upstream.left_out[0].reason
    many = [{"name": f"q{n}", "in": "query", "schema": {}} for n in range(101)]
    assert "more than 100 parameters" in made(asking(*many)).left_out[0].reason
    operations = {f"/{n}": {"get": {"responses": {}}} for n in range(1001)}
    with pytest.raises(BadDocument, match="more than 1000 operations"):
        made(document(operations))
    with pytest.raises(BadDocument, match="deeper than 100"):
        made(asking({"name": "q", "in": "query", "schema": nested(200)}))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{", "is no JSON"),
        (b"[]", "is no object"),
        (b'{"openapi": "2.0"}', "/openapi: must be 3.0.x or 3.1.x"),
        (b'{"openapi": "3.1.0", "paths": []}', "/paths: must be an object"),
        (b"[" * 100_000, "is no JSON"),
        (b"[%b]" % (b"9" * 300), "has a number of more than 256 characters"),
        (b"[0%b]" % (b",0" * 1_000_000), "more than 1000000 values"),
        (b"a: [" * 90 + b"[" * 90, "deeper than 100|is no YAML"),
        (b"a: &a [1]\nb: *a", "aliases are not read"),
        (b"a: !!python/object/apply:os.system [id]", "is no YAML"),
        (b"\xff\xfe\x00", "is no YAML"),
        (b"a" * (bounds.MAX_YAML_BYTES + 1), "bytes of YAML"),
        (b"{" + b" " * bounds.MAX_DOCUMENT_BYTES, "larger than"),
    ],
)
def test_what_is_no_document_is_refused(content: bytes, text: str) -> None:
    with pytest.raises(BadDocument, match=text):
        OpenApiTools("x", content, BASE)


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://x", "https://", "https://u:p@x", "https://x/?q", "https://x/#f", "/v1"),
        *("https://x/..", "https://[", "https://x:0"),
    ],
)
def test_the_operators_url_is_one(url: str) -> None:
    with pytest.raises(BadDocument, match="base URL"):
        made(PETS_30, url)


@pytest.mark.parametrize(
    ("parameter", "path", "text"),
    [
        ({"name": "q", "in": "body"}, "/x", "`in` or `name`"),
        ({"name": "q", "in": "query", "style": "matrix"}, "/x", "style"),
        ({"name": "bad name", "in": "header"}, "/x", "no header can have"),
        ({"name": "a\r\nb", "in": "cookie"}, "/x", "no header can have"),
        ({"name": "q", "in": "query", "content": {"text/xml": {}}}, "/x", "only JSON"),
        ({"name": "id", "in": "path"}, "/x/{other}", "variables are not its parameters"),
        ({"name": "id", "in": "path"}, "/x?{id}", "the path must be one"),
        ({"name": "q", "in": "query", "schema": {"$dynamicRef": "#x"}}, "/x", "is not taken"),
        ({"name": "q", "in": "query", "schema": {"allOf": {}}}, "/x", "must be a list"),
        ({"name": "q", "in": "query", "schema": 3}, "/x", "is no"),
    ],
)
def test_an_operation_that_cannot_be_asked_is_left_out_by_name(
    parameter: dict[str, Any], path: str, text: str
) -> None:
    upstream = made(asking(parameter, path=path))
    assert upstream.tools == []
    assert text in upstream.left_out[0].reason


PLACES = st.sampled_from(["paths", "components", "get", "schema", "properties", "$ref", "x"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLACES, inner, max_size=3),
    max_leaves=8,
)


@given(st.data())
def test_whatever_stands_anywhere_is_taken_or_refused(data: st.DataObject) -> None:
    """One place of a good document replaced by anything: no other error than BadDocument."""
    root = copy.deepcopy(PETS_30)
    holder: Any = root
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = data.draw(st.sampled_from(keys))
        below = holder[key]
        if not isinstance(below, dict | list) or not below or data.draw(st.integers(0, 5)) == 0:
            holder[key] = data.draw(JSON)
            break
        holder = below
    try:
        tools = made(root).tools
    except BadDocument:
        return
    for tool in tools:
        assert tool.input_schema["type"] == "object"
