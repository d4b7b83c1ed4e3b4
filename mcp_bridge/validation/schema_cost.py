"""Measures how much work a JSON Schema can cause, before it is used.

A schema of a few lines can mean 2^30 checks of one value: definitions that each refer twice to
the next, or a recursive one that tries each child in two ways. That takes no regular expression,
so a linear-time engine does not help. Here every subschema and reference is followed once:
`measure` returns, for each depth of a value, how many subschemas may be tried on any one path, and
refuses references out of the document, or to the schema itself without going deeper.

JSON Schema 2020-12 core sections 8 and 10 (identifiers, applicators), draft-7 likewise. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

import msgspec

from foundation.json_numbers import is_index
from mcp_bridge.canonical_json import pointer, walk
from mcp_bridge.errors import SchemaRefused

Parts = tuple[str | int, ...]
Schema = Mapping[str, Any]

SINGLE = (
    *(("in_place", keyword) for keyword in ("not", "if", "then", "else")),
    *(("wild", keyword) for keyword in ("additionalProperties", "unevaluatedProperties")),
    *(("wild", keyword) for keyword in ("additionalItems", "unevaluatedItems", "items")),
    *(("wild", keyword) for keyword in ("propertyNames", "contains")),
)
LISTS = (
    *(("in_place", keyword) for keyword in ("allOf", "anyOf", "oneOf")),
    *(("named", keyword) for keyword in ("items", "prefixItems")),
)
MAPS = (
    *(("in_place", keyword) for keyword in ("dependentSchemas", "dependencies")),
    ("wild", "patternProperties"),
    ("named", "properties"),
    *(("defined", keyword) for keyword in ("$defs", "definitions")),
)
"""How each applicator tries its subschemas: on the same value, on every child, on named ones."""

REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
PUBLISHED = ("https://json-schema.org/draft/", "http://json-schema.org/draft-")
"""Schemas that are built into the validator: those of the dialects."""

PUBLISHED_WORK = 200
MULTIPLE_WORK = 20
"""Work of `multipleOf`, which divides exactly, however far apart the two numbers are."""
LITERALS_PER_WORK = 200
"""Values of an `enum` or `const` that are compared in the time of one subschema."""

MAX_SUBSCHEMAS = 5_000
MAX_SCHEMA_DEPTH = 48
MAX_VALUE_DEPTH = 64
MAX_WORK_PER_PATH = 50_000
"""Subschemas tried on one path of a value; a hand-written tool needs some tens."""


class Node(msgspec.Struct, eq=False):
    """A subschema, and the numbers of those tried on the same value, each child, named children."""

    path: Parts
    base: str
    in_place: list[int]
    wild: list[int]
    named: list[int]
    again: bool = False
    """`unevaluated...` tries the subschemas beside it a second time."""
    fixed: int = 1


class Cost(msgspec.Struct, frozen=True):
    """The cost of a schema.

    `work[d]`: subschemas tried at most on one path of a value that nests d deep; the last stands
    for all deeper ones, unless `deepest` ends there.
    """

    subschemas: int
    work: tuple[int, ...]
    deepest: int
    longest_list: int
    """The most items of an `enum`, `required` or the like, which an error may repeat."""
    is_unique: bool
    """Whether `uniqueItems` is anywhere in it: that may compare every two items."""

    def at(self, depth: int) -> int:
        return self.work[min(depth, len(self.work) - 1)]


class Documents:
    """The documents of a schema: every identified place of it and of those it may refer to."""

    def __init__(self, schema: Schema, known: Mapping[str, Schema], old: bool) -> None:
        self.old = old
        self.resources: dict[str, tuple[Schema, Parts, str]] = {}
        self.anchors: dict[tuple[str, str], tuple[Schema, Parts]] = {}
        self.dynamic: dict[str, list[tuple[Schema, Parts, str]]] = {}
        self.count = 0
        self.longest_list = 0
        self.is_unique = False
        self.root_base = self.index(schema, "")
        for uri, document in known.items():
            self.index(document, uri)

    def index(self, document: Schema, uri: str) -> str:
        """Note every identifier of `document`, and return its base URI."""
        base = based(document, uri, self.old)
        self.resources.setdefault(urldefrag(uri)[0], (document, (), base))
        waiting: list[tuple[Any, Parts, str]] = [(document, (), uri)]
        while waiting:
            schema, path, outer = waiting.pop()
            if not isinstance(schema, Mapping):
                continue
            self.count += 1
            if self.count > MAX_SUBSCHEMAS:
                raise SchemaRefused("", f"more than {MAX_SUBSCHEMAS} subschemas")
            inner = based(schema, outer, self.old)
            self.note(schema, path, inner)
            waiting.extend((child, (*path, *step), inner) for _, step, child in children(schema))
        return base

    def note(self, schema: Schema, path: Parts, base: str) -> None:
        if "$id" in schema and not (self.old and "$ref" in schema):
            self.resources.setdefault(base, (schema, path, base))
            fragment = urldefrag(str(schema["$id"]))[1]
            if fragment:
                self.anchors[base, fragment] = (schema, path)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := schema.get(keyword), str):
                self.anchors.setdefault((base, name), (schema, path))
        if isinstance(name := schema.get("$dynamicAnchor"), str):
            self.dynamic.setdefault(name, []).append((schema, path, base))
        if schema.get("$recursiveAnchor") is True:
            self.dynamic.setdefault("", []).append((schema, path, base))
        self.is_unique = self.is_unique or schema.get("uniqueItems") is True
        lists = [len(v) for k, v in schema.items() if isinstance(v, list | dict) and k != "$defs"]
        self.longest_list = max([self.longest_list, *lists])

    def find(self, reference: str, base: str, at: Parts) -> tuple[Schema, Parts, str] | None:
        """Return the subschema of a reference; None: a published one. Raises: SchemaRefused."""
        target, fragment = urldefrag(joined(base, reference))
        target = target or base  # urljoin leaves nothing of a URN but the fragment
        found = self.resources.get(target)
        if found is None:
            if target.startswith(PUBLISHED):
                return None
            raise SchemaRefused(pointer(at), "a reference that leaves the document")
        if not fragment:
            return found
        if not fragment.startswith("/"):
            anchored = self.anchors.get((target, unquote(fragment)))
            if anchored is None:
                raise SchemaRefused(pointer(at), "a reference to an anchor that is not there")
            return (*anchored, target)
        return self.down(*found, fragment, at)

    def down(
        self, schema: Any, path: Parts, base: str, fragment: str, at: Parts
    ) -> tuple[Schema, Parts, str]:
        for step in fragment.split("/")[1:]:
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(schema, Mapping) and key in schema:
                schema, path = schema[key], (*path, key)
            elif isinstance(schema, list) and is_index(key) and int(key) < len(schema):
                schema, path = schema[int(key)], (*path, int(key))
            else:
                raise SchemaRefused(pointer(at), "a reference to what is not there")
            base = based(schema, base, self.old)
        return schema, path, base


def based(schema: Any, base: str, old: bool) -> str:
    """Return the base URI inside `schema`; before 2019-09 `$id` is ignored beside `$ref`."""
    own = schema.get("$id") if isinstance(schema, Mapping) else None
    if not isinstance(own, str) or (old and "$ref" in schema):
        return base
    return urldefrag(joined(base, own))[0] or base


def joined(base: str, reference: str) -> str:
    """Raises: SchemaRefused, for what is no URI."""
    try:
        return urljoin(base, reference)
    except ValueError:
        raise SchemaRefused("", "a reference or an $id that is no URI") from None


def children(schema: Schema) -> Iterator[tuple[str, Parts, Any]]:
    """Yield (how it is tried, its place, the subschema) of all direct subschemas."""
    for how, keyword in SINGLE:
        if keyword in schema:
            yield how, (keyword,), schema[keyword]
    for how, keyword in LISTS:
        for at, one in enumerate(listed(schema, keyword)):
            yield how, (keyword, at), one
    for how, keyword in MAPS:
        for name, one in mapped(schema, keyword):
            yield how, (keyword, name), one


def listed(schema: Schema, keyword: str) -> list[Any]:
    found = schema.get(keyword)
    return found if isinstance(found, list) else []


def mapped(schema: Schema, keyword: str) -> list[tuple[str, Any]]:
    found = schema.get(keyword)
    return list(found.items()) if isinstance(found, Mapping) else []


def nodes_of(schema: Schema, documents: Documents) -> list[Node]:
    """Return every subschema that can be reached from the root, the root first."""
    nodes: list[Node] = []
    numbers: dict[tuple[int, str], int] = {}
    waiting: list[tuple[Schema, Node]] = []

    def number(one: Any, path: Parts, base: str) -> int | None:
        if not isinstance(one, Mapping):
            return None
        key = (id(one), base)
        if key not in numbers:
            if len(nodes) >= MAX_SUBSCHEMAS:
                raise SchemaRefused("", f"more than {MAX_SUBSCHEMAS} subschemas")
            numbers[key] = len(nodes)
            nodes.append(Node(path, base, [], [], []))
            waiting.append((one, nodes[-1]))
        return numbers[key]

    number(schema, (), documents.root_base)
    while waiting:
        one, node = waiting.pop()
        node.fixed += own_work(one)
        node.again = "unevaluatedProperties" in one or "unevaluatedItems" in one
        for how, step, child in children(one):
            inner = based(child, node.base, documents.old)
            at = number(child, (*node.path, *step), inner) if how != "defined" else None
            if at is not None:
                getattr(node, how).append(at)
        for found in referred(one, node, documents):
            at = number(*found)
            if at is not None and at not in node.in_place:
                node.in_place.append(at)
    return nodes


def own_work(schema: Schema) -> int:
    """Return what a subschema's own keywords cost beyond those of a plain one."""
    literals = sum(1 for key in ("enum", "const") if key in schema for _ in walk(schema[key]))
    multiple = MULTIPLE_WORK if "multipleOf" in schema else 0
    return literals // LITERALS_PER_WORK + multiple


def referred(one: Schema, node: Node, documents: Documents) -> Iterator[tuple[Schema, Parts, str]]:
    for keyword in REFERENCES:
        reference = one.get(keyword)
        if not isinstance(reference, str):
            continue
        found = documents.find(reference, node.base, (*node.path, keyword))
        if found is None:
            node.fixed += PUBLISHED_WORK
            continue
        yield found
        name = urldefrag(reference)[1]
        if keyword != "$ref" and dynamic(found[0], keyword, name):
            yield from documents.dynamic.get(name, [])


def dynamic(target: Any, keyword: str, name: str) -> bool:
    if not isinstance(target, Mapping):
        return False
    if keyword == "$recursiveRef":
        return target.get("$recursiveAnchor") is True
    return target.get("$dynamicAnchor") == name


def inner_first(nodes: list[Node]) -> list[int]:
    """Return an order in which subschemas come before those that try them on the same value."""
    done: dict[int, bool] = {}
    order: list[int] = []
    for start in range(len(nodes)):
        stack = [(start, iter(nodes[start].in_place))] if start not in done else []
        done.setdefault(start, False)
        while stack:
            at, rest = stack[-1]
            child = next(rest, None)
            if child is None:
                done[at] = True
                order.append(at)
                stack.pop()
            elif child not in done:
                done[child] = False
                stack.append((child, iter(nodes[child].in_place)))
            elif not done[child]:
                raise SchemaRefused(
                    pointer(nodes[at].path), "refers to itself without going deeper into the value"
                )
    return order


def measure(schema: Schema, known: Mapping[str, Schema] | None = None, old: bool = False) -> Cost:
    """Return what `schema` can cost. `known`: documents it may refer to, by URI; `old`: before
    2019-09.

    Raises: SchemaRefused, for a reference that leaves these documents, a cycle that goes no deeper,
    or more than MAX_WORK_PER_PATH on the flattest value.
    """
    documents = Documents(schema, known or {}, old)
    nodes = nodes_of(schema, documents)
    order = inner_first(nodes)
    shallower = [0] * len(nodes)
    work: list[int] = []
    for depth in range(MAX_VALUE_DEPTH + 1):
        here = [0] * len(nodes)
        for at in order:
            here[at] = work_of(nodes[at], here, shallower)
        if here[0] > MAX_WORK_PER_PATH:
            if depth == 0:
                raise SchemaRefused("", f"tries more than {MAX_WORK_PER_PATH} subschemas at once")
            return cost_of(documents, nodes, work, depth - 1)
        work.append(here[0])
        if here == shallower:
            break
        shallower = here
    return cost_of(documents, nodes, work, MAX_VALUE_DEPTH)


def cost_of(documents: Documents, nodes: list[Node], work: list[int], deepest: int) -> Cost:
    count = len(nodes)
    return Cost(count, tuple(work), deepest, documents.longest_list, documents.is_unique)


def work_of(node: Node, here: list[int], shallower: list[int]) -> int:
    beside = sum(here[child] for child in node.in_place) * (2 if node.again else 1)
    inside = sum(shallower[child] for child in node.wild)
    inside += max((shallower[child] for child in node.named), default=0)
    # Capped far beyond every bound, so that sums stay small integers.
    return min(node.fixed + beside + inside, 1 << 40)
