"""What a route of administration says of itself in the OpenAPI document: its query, its body, its
answer and its errors, as the structs that read and write them.

Above: the routes. Below: Litestar's OpenAPI objects; `schema` makes the document's components of
`described()`.

    @post(..., operation_class=describes(body=NewPlan, answer=PlanView, status=201))

Litestar sees bytes, because our own decoders read bodies and queries (they name the field that is
to blame); here it is told what the bytes are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from litestar.openapi.spec import (
    OpenAPIHeader,
    OpenAPIMediaType,
    OpenAPIResponse,
    Operation,
    Parameter,
    Reference,
    RequestBody,
    Schema,
)

from gateway.errors import ErrorBody
from gateway.routes.problem import MEDIA_TYPE, Problem

JSON = "application/json"
TEMPLATE = "#/components/schemas/{name}"


class ErrorEnvelope(msgspec.Struct, frozen=True):
    """An error in OpenAI's shape."""

    error: ErrorBody


@dataclass
class JsonSchema(Schema):
    """A schema that msgspec wrote, passed on as it is."""

    content: dict[str, Any] = field(default_factory=dict)

    def to_schema(self) -> dict[str, Any]:
        return self.content


_described: list[Any] = [ErrorEnvelope, Problem]


def described() -> tuple[Any, ...]:
    """Every type that some route names: they are components of the document."""
    return tuple(dict.fromkeys(_described))


def refers_to(kind: Any) -> Reference:
    """The name is msgspec's, which knows generic structs too."""
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=TEMPLATE)
    return Reference(ref=schema["$ref"])


def content(kind: Any, media_type: str = JSON) -> dict[str, OpenAPIMediaType]:
    return {media_type: OpenAPIMediaType(schema=refers_to(kind))}


def text_header(name: str, description: str) -> Parameter:
    schema = JsonSchema(content={"type": "string", "maxLength": 255})
    return Parameter(
        name=name, param_in="header", description=description, required=False, schema=schema
    )


IDEMPOTENCY_KEY = text_header(
    "Idempotency-Key", "Repeated with the same key within 24 hours, the request is done once."
)
IF_MATCH = text_header("If-Match", "ETags, one of which must still be current; else 412.")


def parameters(query: type[msgspec.Struct]) -> Iterator[Parameter]:
    _, found = msgspec.json.schema_components([query], ref_template=TEMPLATE)
    schema = found[query.__name__]
    for name, each in schema["properties"].items():
        yield Parameter(
            name=name,
            param_in="query",
            required=name in schema["required"],
            schema=JsonSchema(content=without_null(each)),
        )


def without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A parameter that is not given is null to us; nobody can write that in a query."""
    kinds = [each for each in schema.get("anyOf", []) if each != {"type": "null"}]
    kept = {key: value for key, value in schema.items() if key not in ("anyOf", "default")}
    if len(kinds) == 1:
        return {**kept, **kinds[0]}
    return {**kept, "anyOf": kinds} if kinds else kept


def describes(
    *,
    answer: Any,
    body: type[msgspec.Struct] | None = None,
    query: type[msgspec.Struct] | None = None,
    status: int = 200,
    idempotent: bool = False,
    conditional: bool = False,
    problems: bool = True,
) -> type[Operation]:
    """`answer` None: none. `idempotent`: a POST, which honours Idempotency-Key. `conditional`: it
    honours If-Match. `problems`: errors are RFC 9457's, else in OpenAI's shape."""
    _described.extend(each for each in (answer, body) if each is not None)
    added = [*([] if query is None else parameters(query))]
    added += [IDEMPOTENCY_KEY] if idempotent else []
    added += [IF_MATCH] if conditional else []
    errors = content(Problem, MEDIA_TYPE) if problems else content(ErrorEnvelope)
    etag = {"ETag": OpenAPIHeader(schema=JsonSchema(content={"type": "string"}))}
    done = OpenAPIResponse(
        description="Done.",
        content=None if answer is None else content(answer),
        headers=etag if conditional else None,  # type: ignore[arg-type]
    )

    @dataclass
    class Described(Operation):
        def __post_init__(self) -> None:
            self.parameters = [*(self.parameters or []), *added]
            self.responses = {
                str(status): done,
                "default": OpenAPIResponse(description="It was refused.", content=errors),
            }
            if body is not None:
                self.request_body = RequestBody(required=True, content=content(body))

    return Described
