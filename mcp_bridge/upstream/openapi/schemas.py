"""Converts schemas of a document to self-contained JSON Schema 2020-12.

References stay references, to `$defs` that are included: an expanded schema could be infinite, or
exponential in size. The keywords of OpenAPI 3.0, a dialect of its own, are translated. Properties
for one direction (`readOnly`, `writeOnly`) are left out of the other.
"""

from __future__ import annotations

import re
from typing import Final, Literal

from mcp_bridge.upstream.openapi.document import Document, Json, Object, joined, local, parts_of
from mcp_bridge.upstream.openapi.errors import BadDocument

MAX_SCHEMA_NODES = 5_000
"""Subschemas of one tool, `$defs` included."""
MAX_SCHEMA_DEPTH = 40
MAX_DEFS = 500

Direction = Literal["request", "response"]

ONE: Final = frozenset(
    "additionalItems additionalProperties contains contentSchema else if items not propertyNames"
    " then unevaluatedItems unevaluatedProperties".split()
)
MANY: Final = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
NAMED: Final = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
)
LEFT_OUT: Final = frozenset(
    "$schema $id $anchor $comment $vocabulary xml externalDocs discriminator example nullable"
    " readOnly writeOnly $defs definitions".split()
)
"""Keywords that only mean something in the document, or only to people. `$defs` are added anew."""
REFUSED: Final = frozenset(("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"))
NAME: Final = re.compile(r"[^A-Za-z0-9_.-]+")


class Converter:
    """Converts the schemas of one tool, for one direction. Use `with_defs` at the end."""

    def __init__(self, document: Document, direction: Direction) -> None:
        self._document = document
        self._hidden = "readOnly" if direction == "request" else "writeOnly"
        self._names: dict[str, str] = {}
        """By reference."""
        self._defs: Object = {}
        self._waiting: list[str] = []
        self._nodes = 0

    def convert(self, schema: Json, pointer: str, depth: int = 0) -> Json:
        """Raises: BadDocument."""
        self._nodes += 1
        if self._nodes > MAX_SCHEMA_NODES or depth > MAX_SCHEMA_DEPTH:
            raise BadDocument(pointer, "schemas of one operation are too many or too deep")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise BadDocument(pointer, "is no schema")
        if refused := REFUSED & schema.keys():
            raise BadDocument(pointer, f"{min(refused)} is not taken")
        if "$ref" in schema and self._document.is_30:
            schema = {"$ref": schema["$ref"]}  # OpenAPI 3.0 ignores its siblings
        made: Object = {}
        for keyword, value in schema.items():
            if keyword in LEFT_OUT or keyword.startswith("x-"):
                continue
            made[keyword] = self._keyword(keyword, value, joined(pointer, keyword), depth)
        if self._document.is_30:
            _modernise(schema, made)
        self._leave_out(schema, made)
        return made

    def with_defs(self, schema: Object) -> Object:
        """Return `schema` with the `$defs` of all its references. Raises: BadDocument."""
        while self._waiting:
            reference = self._waiting.pop()
            found = self._document.at(reference)
            self._defs[self._names[reference]] = self.convert(found, reference)
        return {**schema, "$defs": dict(sorted(self._defs.items()))} if self._defs else schema

    def _keyword(self, keyword: str, value: Json, pointer: str, depth: int) -> Json:
        if keyword == "$ref":
            return f"#/$defs/{self._named(local(value, pointer), pointer)}"
        if keyword in ONE and isinstance(value, dict | bool):
            return self.convert(value, pointer, depth + 1)
        if keyword in MANY or (keyword == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                raise BadDocument(pointer, "must be a list")
            return [
                self.convert(each, joined(pointer, at), depth + 1) for at, each in enumerate(value)
            ]
        if keyword in NAMED:
            if not isinstance(value, dict):
                raise BadDocument(pointer, "must be an object")
            return {
                name: self.convert(each, joined(pointer, name), depth + 1)
                for name, each in value.items()
            }
        return value

    def _named(self, reference: str, pointer: str) -> str:
        known = self._names.get(reference)
        if known is not None:
            return known
        if len(self._names) >= MAX_DEFS:
            raise BadDocument(pointer, f"more than {MAX_DEFS} schemas are referred to")
        base = NAME.sub("_", (parts_of(reference) or ["root"])[-1])[:64] or "schema"
        taken = set(self._names.values())
        name, number = base, 2
        while name in taken:
            name, number = f"{base}_{number}", number + 1
        self._names[reference] = name
        self._waiting.append(reference)
        return name

    def _leave_out(self, schema: Object, made: Object) -> None:
        properties = schema.get("properties")
        if not isinstance(properties, dict):
            return
        hidden = {
            name
            for name, each in properties.items()
            if isinstance(each, dict) and each.get(self._hidden) is True
        }
        if not hidden:
            return
        made["properties"] = {k: v for k, v in made["properties"].items() if k not in hidden}
        if isinstance(made.get("required"), list):
            required = made["required"]
            made["required"] = [
                name for name in required if not (isinstance(name, str) and name in hidden)
            ]


def _modernise(schema: Object, made: Object) -> None:
    """Translate OpenAPI 3.0's `nullable` and JSON Schema draft 5's boolean bounds."""
    if schema.get("nullable") is True and isinstance(made.get("type"), str):
        made["type"] = [made["type"], "null"]
        enum = made.get("enum")
        if isinstance(enum, list) and None not in enum:
            made["enum"] = [*enum, None]
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(made.get(exclusive), bool):
            if made.pop(exclusive) and bound in made:
                made[exclusive] = made.pop(bound)
