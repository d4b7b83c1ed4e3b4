"""Generates docs/fields.md: what becomes of every field that a client can send, from the structs
that read requests and the notes of `surfaces`.

    python -m gateway.wire.fields.table > docs/fields.md      (make fields)

A field is refused where its struct takes nothing but null, ignored where a surface declares that
nothing can come of it, and honoured otherwise; whatever no struct knows is refused as unknown.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Literal

import msgspec
from msgspec import inspect

from gateway.wire.fields.surfaces import FORWARDED, REQUEST_HEADERS, SURFACES, SurfaceFields

Treatment = Literal["honoured", "refused", "ignored"]
INTRODUCTION = """\
# Every field of every surface

Made by `make fields` of the code that reads requests; a test keeps it current. What is not listed
is refused by its name, unless the installation or the model is set to ignore it (`unknown_fields`
in [configuration](configuration.md)): then the answer's header `X-Tollgate-Ignored-Fields` names
it. null is the same as leaving a field out.

- **honoured**: it does what its specification says.
- **refused**: 400, which names it: what it asks for is not done here.
- **ignored**: by its specification nothing in the answer can show whether it was read, or it is a
  wish of which nothing comes, and its note says so.
"""


class Row(msgspec.Struct):
    path: str
    treatment: Treatment
    takes: str
    only: tuple[str, ...]
    """Kinds of the object around it that have it, where not all do."""


def page() -> str:
    return (
        INTRODUCTION
        + "".join(f"\n{table(surface)}" for surface in SURFACES)
        + forwarded()
        + headers()
    )


def table(surface: SurfaceFields) -> str:
    lines = [f"## {surface.title}\n\n", "| field | | |\n", "|---|---|---|\n"]
    for row in rows(surface):
        kinds = f" ({', '.join(row.only)})" if row.only else ""
        said = [row.takes, surface.notes.get(row.path, surface.ignored.get(row.path, ""))]
        text = "; ".join(filter(None, said))
        lines.append(f"| `{row.path}`{kinds} | {row.treatment} | {text} |\n")
    for path, values in surface.refused_values.items():
        named = ", ".join(f"`{value}`" for value in sorted(values))
        lines.append(f"| `{path}`: {named} | refused | |\n")
    return "".join(lines)


def forwarded() -> str:
    lines = [
        "\n## Chat completions of an upstream's model\n\n",
        "Everything goes to the upstream as it came, which judges it, but for these:\n\n",
        "| field | | |\n|---|---|---|\n",
    ]
    lines += [f"| `{name}` | refused | {why} |\n" for name, why in FORWARDED.items()]
    return "".join(lines)


def headers() -> str:
    lines = [
        "\n## Request headers\n\n",
        "Beside the credential, and those of HTTP itself:\n\n",
        "| header | on | |\n|---|---|---|\n",
    ]
    for header in REQUEST_HEADERS:
        on = ", ".join(f"`{each}`" for each in header.on)
        lines.append(f"| `{header.name}` | {on} | {header.meaning} |\n")
    return "".join(lines)


def rows(surface: SurfaceFields) -> list[Row]:
    found = list(of_struct(inspect.type_info(surface.body), "", ()))
    for row in found:
        if row.path in surface.ignored:
            row.treatment = "ignored"
    declared = surface.ignored.keys() | surface.notes.keys()
    unknown = declared - {row.path for row in found}
    assert not unknown, f"{surface.title} has no {unknown}"
    return found


def of_struct(kind: inspect.Type, path: str, only: tuple[str, ...]) -> Iterator[Row]:
    """Yield a struct's fields, each followed by what it holds."""
    assert isinstance(kind, inspect.StructType)
    for field in kind.fields:
        yield from of_field([field.type], f"{path}{field.encode_name}", only)


def of_field(kinds: list[inspect.Type], path: str, only: tuple[str, ...] = ()) -> Iterator[Row]:
    """Yield the rows of a field. `kinds`: one for each object that has it."""
    members = [each for each in members_of(*kinds) if not isinstance(each, inspect.NoneType)]
    treatment: Treatment = "honoured" if members else "refused"
    yield Row(path, treatment, " or ".join(dict.fromkeys(map(describe, members))), only)
    yield from of_members(members, path)


def of_members(members: list[inspect.Type], path: str) -> Iterator[Row]:
    structs = [each for each in members if isinstance(each, inspect.StructType)]
    items = [each.item_type for each in members if isinstance(each, inspect.ListType)]
    if items:
        yield from of_members(members_of(*items), f"{path}[]")
    tags = [str(struct.tag) for struct in structs if struct.tag is not None]
    if tags:
        tag_field = next(struct.tag_field for struct in structs if struct.tag is not None)
        yield Row(f"{path}.{tag_field}", "honoured", ", ".join(f"`{tag}`" for tag in tags), ())
    seen: set[str] = set()
    for struct in structs:
        for field in struct.fields:
            if field.encode_name in seen:
                continue
            seen.add(field.encode_name)
            having = [each for each in structs if has(each, field.encode_name)]
            only = () if len(having) == len(structs) else tuple(str(each.tag) for each in having)
            kinds = [type_of(each, field.encode_name) for each in having]
            yield from of_field(kinds, f"{path}.{field.encode_name}", only)


def has(struct: inspect.StructType, name: str) -> bool:
    return any(field.encode_name == name for field in struct.fields)


def type_of(struct: inspect.StructType, name: str) -> inspect.Type:
    return next(field.type for field in struct.fields if field.encode_name == name)


def members_of(*kinds: inspect.Type) -> list[inspect.Type]:
    """Return the members of all of them, each once."""
    found: list[inspect.Type] = []
    for kind in kinds:
        while isinstance(kind, inspect.Metadata):
            kind = kind.type
        members = kind.types if isinstance(kind, inspect.UnionType) else [kind]
        found += [each for each in members if each not in found]
    return found


def describe(kind: inspect.Type) -> str:
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType() | inspect.FloatType():
            name = "whole number" if isinstance(kind, inspect.IntType) else "number"
            return name + bounds(kind)
        case inspect.StrType():
            return "text" + ("" if kind.max_length is None else f" of up to {kind.max_length}")
        case inspect.LiteralType():
            return ", ".join(f"`{value}`" for value in kind.values)
        case inspect.ListType():
            return "array" + ("" if kind.max_length is None else f" of up to {kind.max_length}")
        case inspect.DictType():
            return "object" + ("" if kind.max_length is None else f" of up to {kind.max_length}")
        case inspect.StructType():
            return "object"
    return "anything"


def bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    low, high = kind.ge, kind.le
    if low is None or high is None:
        return ""
    if abs(high) >= 2**62:
        return "" if abs(low) >= 2**62 else f" from {low}"
    return f" from {low} to {high}"


if __name__ == "__main__":
    sys.stdout.write(page())
