"""Reads an OpenAPI document as bounded JSON, and resolves its references.

A reference is a JSON pointer into the document itself; nothing is ever fetched (OpenAPI 3.0.4 and
3.1.1, "Reference Object"). References are resolved in place, but those of schemas stay.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import unquote

import msgspec
import yaml

from foundation.json_numbers import is_index, slow_number
from foundation.json_values import has_more_values
from mcp_bridge.upstream.openapi.errors import BadDocument

MAX_DOCUMENT_BYTES = 8 * 1024 * 1024
MAX_YAML_BYTES = 2 * 1024 * 1024
"""Less than for JSON, since parsing YAML takes far longer."""
MAX_NODES = 1_000_000
MAX_DEPTH = 100
MAX_REFERENCES = 16
"""References to references that are followed."""

VERSIONS: Final = ("3.0.", "3.1.")

Json = Any
Object = dict[str, Any]


class Document:
    """A parsed document within its bounds; `root` must not be changed."""

    def __init__(self, root: Object) -> None:
        self.root = root
        version = root.get("openapi")
        if not isinstance(version, str) or not version.startswith(VERSIONS):
            raise BadDocument("/openapi", "must be 3.0.x or 3.1.x")
        self.is_30 = version.startswith("3.0.")

    @classmethod
    def parse(cls, content: bytes) -> Document:
        """Parse JSON or YAML; it blocks. Raises: BadDocument."""
        root = _parsed(content)
        if not isinstance(root, dict):
            raise BadDocument("", "is no object")
        _check_size(root)
        return cls(root)

    def at(self, pointer: str) -> Json:
        """Return the value that a `#/...` reference points to. Raises: BadDocument."""
        found: Json = self.root
        for part in parts_of(pointer):
            if isinstance(found, dict) and part in found:
                found = found[part]
            elif isinstance(found, list) and is_index(part) and int(part) < len(found):
                found = found[int(part)]
            else:
                raise BadDocument(pointer, "a reference to nothing")
        return found

    def resolved(self, value: Json, pointer: str) -> Object:
        """Return `value`, or the object that it refers to. Raises: BadDocument."""
        for _ in range(MAX_REFERENCES):
            if not isinstance(value, dict):
                raise BadDocument(pointer, "is no object")
            if "$ref" not in value:
                return value
            value = self.at(local(value["$ref"], pointer))
        raise BadDocument(pointer, f"more than {MAX_REFERENCES} references in a row")


def local(reference: Json, pointer: str) -> str:
    """Return a reference into this document. Raises: BadDocument, for any other."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise BadDocument(pointer, "$ref must be a `#/...` of this document; no other is followed")
    return reference


def parts_of(reference: str) -> list[str]:
    """Return the parts of a reference (RFC 6901, section 6): percent-decoded, then `~1` and
    `~0`."""
    if reference == "#":
        return []
    parts = unquote(reference[2:]).split("/")
    return [part.replace("~1", "/").replace("~0", "~") for part in parts]


def joined(pointer: str, *parts: str | int) -> str:
    for part in parts:
        pointer += "/" + str(part).replace("~", "~0").replace("/", "~1")
    return pointer


def _parsed(content: bytes) -> Json:
    if len(content) > MAX_DOCUMENT_BYTES:
        raise BadDocument("", f"larger than {MAX_DOCUMENT_BYTES} bytes")
    if slow := slow_number(content):
        raise BadDocument("", f"has {slow.reason}")
    if content.lstrip()[:1] in (b"{", b"["):
        if has_more_values(content, MAX_NODES) is not None:
            raise BadDocument("", f"more than {MAX_NODES} values")
        try:
            return msgspec.json.decode(content)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            raise BadDocument("", "is no JSON") from None
    if len(content) > MAX_YAML_BYTES:
        raise BadDocument("", f"larger than {MAX_YAML_BYTES} bytes of YAML; JSON may be larger")
    try:
        _check_events(content)
        return yaml.load(content, PlainLoader)
    except (yaml.YAMLError, RecursionError, ValueError):
        raise BadDocument("", "is no YAML") from None


def _check_events(content: bytes) -> None:
    """Refuse aliases and deep nesting before the document is built: an alias can make a small text
    a large document."""
    depth = 0
    for event in yaml.parse(content, Loader=yaml.CSafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise BadDocument("", "YAML's aliases are not read")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise BadDocument("", f"deeper than {MAX_DEPTH}")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


class PlainLoader(yaml.CSafeLoader):
    """A YAML loader that produces JSON values only."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping with string keys: a status is often written `200:` without quotes."""
        plain = super().construct_mapping(node, deep=deep)
        return {key if isinstance(key, str) else str(key): each for key, each in plain.items()}


PlainLoader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:timestamp"]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _check_size(root: Json) -> None:
    """Bound values and depth, without recursion. Raises: BadDocument."""
    nodes = 0
    level: list[Json] = [root]
    for _ in range(MAX_DEPTH):
        below: list[Json] = []
        for value in level:
            nodes += 1
            if isinstance(value, dict):
                below += value.values()
            elif isinstance(value, list):
                below += value
        if nodes + len(below) > MAX_NODES:
            raise BadDocument("", f"more than {MAX_NODES} values")
        if not below:
            return
        level = below
    raise BadDocument("", f"deeper than {MAX_DEPTH}")
