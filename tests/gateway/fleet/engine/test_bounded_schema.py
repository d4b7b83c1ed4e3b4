"""Bounds of a schema by its model's folder: less is valid by them, never more, never nothing."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.fleet.engine.bounded_schema import bounded_schema, guiding_schema
from gateway.fleet.engine.folder_options import FolderOptions
from tests.budget import examples

OPTIONS = FolderOptions(free_string_chars=4, free_integer_digits=2, free_items=2)
STRING: dict[str, Any] = {"type": "string", "maxLength": 4}
INTEGER: dict[str, Any] = {"type": "integer", "minimum": -99, "maximum": 99}


@pytest.mark.parametrize(
    ("schema", "bounded"),
    [
        ({"type": "string"}, STRING),
        ({"type": ["string", "null"]}, {"type": ["string", "null"], "maxLength": 4}),
        ({"type": "string", "minLength": 9}, {"type": "string", "minLength": 9, "maxLength": 9}),
        ({"type": "integer"}, INTEGER),
        ({"type": "integer", "minimum": 5}, {"type": "integer", "minimum": 5, "maximum": 99}),
        ({"type": "integer", "minimum": 500}, {"type": "integer", "minimum": 500, "maximum": 599}),
        (
            {"type": "integer", "exclusiveMaximum": -500},
            {"type": "integer", "exclusiveMaximum": -500, "minimum": -599},
        ),
        (
            {"type": "array", "items": {"type": "string"}, "minItems": 3},
            {"type": "array", "items": STRING, "minItems": 3, "maxItems": 3},
        ),
        (
            {"type": "object", "properties": {"maxLength": {"type": "string"}}},
            {"type": "object", "properties": {"maxLength": STRING}},
        ),
        (
            {"anyOf": [{"type": "string"}, {"type": "null"}]},
            {"anyOf": [STRING, {"type": "null"}]},
        ),
        (
            {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"},
            {"$defs": {"n": INTEGER}, "$ref": "#/$defs/n"},
        ),
    ],
)
def test_what_is_free_gets_a_bound(schema: dict[str, Any], bounded: dict[str, Any]) -> None:
    assert bounded_schema(schema, OPTIONS) == bounded


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "enum": ["a long string"]},
        {"const": "a long string", "type": "string"},
        {"type": "string", "pattern": "^a+$"},
        {"type": "string", "format": "date"},
        {"type": "string", "maxLength": 900},
        {"type": "string", "allOf": [{"minLength": 9}]},
        {"minLength": 9, "anyOf": [{"type": "string"}]},
        {"type": "integer", "multipleOf": 1000},
        {"type": "integer", "minimum": 0, "maximum": 100_000},
        {"type": "number"},
        {"not": {"type": "string"}},
        {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 9}]},
        {"type": ["broken", 7], "properties": "none", "items": True},
    ],
)
def test_what_is_settled_stays(schema: dict[str, Any]) -> None:
    assert bounded_schema(schema, OPTIONS) == schema


def lengths(low: str, high: str) -> st.SearchStrategy[dict[str, Any]]:
    """None, one or both of two bounds that leave something between them."""
    least, more = st.integers(0, 6), st.integers(0, 3)
    both = st.builds(lambda at, by: {low: at, high: at + by}, least, more)
    return st.one_of(st.just({}), least.map(lambda at: {low: at}), both)


LEAVES = st.one_of(
    lengths("minLength", "maxLength").map(lambda bounds: {"type": "string", **bounds}),
    lengths("minimum", "maximum").map(lambda bounds: {"type": "integer", **bounds}),
    st.sampled_from([{"type": "null"}, {"enum": ["a long string", 1]}, {"const": 7}]),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(
            lambda items, bounds: {"type": "array", "items": items, **bounds},
            inner,
            lengths("minItems", "maxItems"),
        ),
        st.dictionaries(st.sampled_from(["a", "b", "minLength"]), inner).map(
            lambda found: {"type": "object", "properties": found, "required": list(found)}
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda found: {"anyOf": found}),
    ),
    max_leaves=6,
)


@given(data=st.data(), schema=SCHEMAS)
@settings(deadline=None, max_examples=examples(60))
def test_what_is_valid_by_it_was_valid_before(data: st.DataObject, schema: dict[str, Any]) -> None:
    bounded = bounded_schema(schema, OPTIONS)
    value = data.draw(valid_by(bounded))
    assert jsonschema_rs.is_valid(bounded, value)
    assert jsonschema_rs.is_valid(schema, value)


def valid_by(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values of a schema of `SCHEMAS`; there always are some."""
    if "anyOf" in schema:
        return st.one_of([valid_by(each) for each in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    match schema["type"]:
        case "string":
            return st.text("ab", min_size=schema.get("minLength", 0), max_size=schema["maxLength"])
        case "integer":
            return st.integers(schema["minimum"], schema["maximum"])
        case "array":
            items = valid_by(schema["items"])
            return st.lists(items, min_size=schema.get("minItems", 0), max_size=schema["maxItems"])
        case "object":
            properties = {name: valid_by(each) for name, each in schema["properties"].items()}
            return st.fixed_dictionaries(properties)
    return st.none()


FREE = {"type": "object"}
A_STRING = {"type": "string"}


@pytest.mark.parametrize(
    ("parameters", "guide"),
    [
        (None, {}),
        ({"properties": {"a": {"type": "string", "pattern": "["}}}, {"a": A_STRING}),
        (
            {"properties": {"a": {"enum": ["x", "y"], "type": "string"}}},
            {"a": {"enum": ["x", "y"]}},
        ),
        ({"properties": {"a": {"enum": [1, "y"]}, "b": {"$ref": "#/x"}}}, {"a": {}, "b": {}}),
        ({"properties": {"a": {"type": ["string", "null"]}, "b": True}}, {"a": {}, "b": {}}),
        ({"properties": {"a": {"type": "array", "items": A_STRING}}}, {"a": {"type": "array"}}),
        ({"properties": {"a": A_STRING}, "additionalProperties": {}}, None),
        ({"properties": {"a" * 200: A_STRING}}, None),
        ({"properties": {f"a{at}": A_STRING for at in range(40)}}, None),
        ({"properties": []}, None),
    ],
)
def test_a_guide_has_names_and_simple_types(
    parameters: dict[str, Any] | None, guide: dict[str, Any] | None
) -> None:
    found = guiding_schema(parameters)
    if guide is None:
        assert found == FREE
    else:
        assert found == {**FREE, "properties": guide, "required": [], "additionalProperties": False}


def test_a_guide_knows_what_is_required() -> None:
    properties = {"b": A_STRING, "a": A_STRING}
    for required, kept in ((["a", "c"], ["a"]), (["a", "b"], ["b", "a"]), ("a", []), ([[]], [])):
        found = guiding_schema({"properties": properties, "required": required})
        assert found["required"] == kept
