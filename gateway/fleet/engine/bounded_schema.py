"""Bounds the strings, integers and arrays of a JSON schema that names no bound for them.

A small model under a grammar may go on forever where the grammar lets it. What is valid by the
bounded schema is valid by the one that was asked for. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.fleet.engine.folder_options import FolderOptions

TURNING = frozenset({"not", "if", "oneOf", "contains", "dependentSchemas", "unevaluatedItems"})
"""Keywords under which less that is valid may mean more. A schema with one of them is left as it
is."""
COMPOSED = ("allOf", "anyOf", "$ref", "$dynamicRef")
"""Keywords that a value has to satisfy, too: with bounds beside them nothing might be valid."""
OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
OF_LISTS = ("anyOf", "prefixItems")
OF_ONE = ("items", "additionalProperties")
SETTLED = ("enum", "const", "pattern", "format", "maxLength")
SIMPLE_TYPES = ("string", "integer", "number", "boolean", "array", "object")
MAX_GUIDED, MAX_GUIDED_CHARS = 32, 128
"""Bounds on the parameters, and on the choices of one, that a call is guided by."""
ASSERTIONS = (
    "minLength", "maxLength", "pattern", "format", "enum", "const", "minimum", "exclusiveMinimum",
    "maximum", "exclusiveMaximum", "multipleOf", "minItems", "allOf",
)  # fmt: skip


def bounded_schema(schema: Mapping[str, Any], options: FolderOptions) -> dict[str, Any]:
    """Return the schema with bounds where it has none. What is no schema comes back as it is: the
    engine says so."""
    if turns(schema):
        return dict(schema)
    bounded: dict[str, Any] = _bounded(schema, options)
    return bounded


def turns(schema: Any) -> bool:
    """Return whether a keyword of `TURNING` is in it, or a name like one: those are rare."""
    if isinstance(schema, Mapping):
        return not TURNING.isdisjoint(schema) or any(turns(each) for each in schema.values())
    return isinstance(schema, list) and any(turns(each) for each in schema)


def guiding_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the names of a tool's parameters with their simple types, and nothing else of its
    schema: what always compiles. Where they are too many, or others are allowed: any object."""
    schema = parameters or {}
    given, required = schema.get("properties", {}), schema.get("required", [])
    is_free = schema.get("additionalProperties", False) is not False
    if is_free or not isinstance(given, Mapping) or len(given) > MAX_GUIDED:
        return {"type": "object"}
    if any(len(name) > MAX_GUIDED_CHARS for name in given):
        return {"type": "object"}
    return {
        "type": "object",
        "properties": {name: _simple(each) for name, each in given.items()},
        "required": [n for n in given if n in required] if isinstance(required, list) else [],
        "additionalProperties": False,
    }


def _simple(schema: Any) -> dict[str, Any]:
    """Return the type or the choices of a parameter; {}: anything."""
    if not isinstance(schema, Mapping):
        return {}
    choices, kind = schema.get("enum"), schema.get("type")
    if isinstance(choices, list) and 0 < len(choices) <= MAX_GUIDED:
        if all(isinstance(each, str) and len(each) <= MAX_GUIDED_CHARS for each in choices):
            return {"enum": choices}
    return {"type": kind} if kind in SIMPLE_TYPES else {}


def _bounded(schema: Any, options: FolderOptions) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for key in OF_SCHEMAS:
        if isinstance(made.get(key), Mapping):
            made[key] = {name: _bounded(each, options) for name, each in made[key].items()}
    for key in OF_LISTS:
        is_free = key != "anyOf" or not any(each in made for each in ASSERTIONS)
        if isinstance(made.get(key), list) and is_free:
            made[key] = [_bounded(each, options) for each in made[key]]
    for key in OF_ONE:
        if isinstance(made.get(key), Mapping):
            made[key] = _bounded(made[key], options)
    if any(key in made for key in COMPOSED):
        return made
    types = made.get("type")
    kinds = types if isinstance(types, list) else [types]
    if "string" in kinds and options.free_string_chars is not None:
        _bound_string(made, options.free_string_chars)
    if "integer" in kinds and options.free_integer_digits is not None:
        _bound_integer(made, 10**options.free_integer_digits - 1)
    if "array" in kinds and options.free_items is not None:
        _bound_array(made, options.free_items)
    return made


def _bound_string(schema: dict[str, Any], most: int) -> None:
    if not any(key in schema for key in SETTLED):
        schema["maxLength"] = max(most, _whole(schema.get("minLength", 0)))


def _bound_integer(schema: dict[str, Any], most: int) -> None:
    """Bound the side that is open; a range that begins beyond `most` is as wide."""
    if any(key in schema for key in ("enum", "const", "multipleOf")):
        return
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if high is None:
        start = _whole(low if low is not None else 0)
        schema["maximum"] = most if start < most else start + most
    if low is None:
        end = _whole(high if high is not None else 0)
        schema["minimum"] = -most if end > -most else end - most


def _bound_array(schema: dict[str, Any], most: int) -> None:
    if not any(key in schema for key in ("maxItems", "enum", "const")):
        fixed = schema.get("prefixItems")
        least = max(_whole(schema.get("minItems", 0)), len(fixed) if isinstance(fixed, list) else 0)
        schema["maxItems"] = max(most, least)


def _whole(value: Any) -> int:
    """Return a number of a schema as a whole one; 0 for what is none, which the engine refuses."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return int(value) if is_number and abs(value) < 1e300 else 0
