"""Declares routes, and describes them in the OpenAPI document: their query, their body, their
answer and their errors, as the structs that read and write them.

    batches = RouteGroup("Batches", needs(SCOPE_INFERENCE))

    @batches.get("/v1/batches/{batch_id:str}", "One batch", answer=BatchObject)
    async def retrieve(request: AuthenticatedRequest, batch_id: FromPath[str]) -> Response[bytes]:

Litestar sees bytes, because our own decoders read bodies and queries (they name the field that is
to blame); here it is told what the bytes are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import msgspec
from litestar.handlers import HTTPRouteHandler
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
from litestar.types import Guard

from gateway.http_errors.table import ErrorBody
from gateway.routes.shared.media_types import FORM, JSON
from gateway.routes.shared.problem import Problem
from gateway.wire.anthropic.reports import AnthropicError

TEMPLATE = "#/components/schemas/{name}"


class ErrorEnvelope(msgspec.Struct, frozen=True):
    """An error in OpenAI's shape."""

    error: ErrorBody


def each_of(kind: Any) -> tuple[Any, ...]:
    return kind if isinstance(kind, tuple) else (kind,)


@dataclass
class JsonSchema(Schema):
    """A schema that msgspec wrote, passed on as it is."""

    content: dict[str, Any] = field(default_factory=dict)

    def to_schema(self) -> dict[str, Any]:
        return self.content


_described: list[Any] = [ErrorEnvelope, Problem, AnthropicError]


def described() -> tuple[Any, ...]:
    """Return every type that some route names: they are components of the document."""
    return tuple(dict.fromkeys(_described))


@cache
def refers_to(kind: Any) -> Reference | JsonSchema:
    """Refer to a component by msgspec's name, which knows generic structs too."""
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=TEMPLATE)
    return Reference(ref=schema["$ref"]) if "$ref" in schema else JsonSchema(content=schema)


def content(kind: Any, media_type: str = JSON) -> dict[str, OpenAPIMediaType]:
    """Describe a content. `kind`: a type, or several of which it is one."""
    if not isinstance(kind, tuple):
        return {media_type: OpenAPIMediaType(schema=refers_to(kind))}
    schemas = [refers_to(each).to_schema() for each in kind]
    return {media_type: OpenAPIMediaType(schema=JsonSchema(content={"anyOf": schemas}))}


def text_header(name: str, description: str) -> Parameter:
    schema = JsonSchema(content={"type": "string", "maxLength": 255})
    return Parameter(
        name=name, param_in="header", description=description, required=False, schema=schema
    )


IDEMPOTENCY_KEY = text_header(
    "Idempotency-Key", "Repeated with the same key within 24 hours, the request is done once."
)
ETAG = OpenAPIHeader(schema=JsonSchema(content={"type": "string"}))
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
    """Drop null: a parameter that is not given is null to us; nobody can write that in a query."""
    kinds = [each for each in schema.get("anyOf", []) if each != {"type": "null"}]
    kept = {key: value for key, value in schema.items() if key not in ("anyOf", "default")}
    if len(kinds) == 1:
        return {**kept, **kinds[0]}
    return {**kept, "anyOf": kinds} if kinds else kept


@dataclass
class DocumentedOperation(Operation):
    """An operation of which a route has said what Litestar does not see."""

    def __post_init__(self) -> None:
        """Called once Litestar has filled in what it sees."""


Said = Mapping[int, Mapping[str, Any]]
"""By status: what each media type holds, as a type; no media type: no body."""


def describes(
    *,
    answer: Any = None,
    body: Any = None,
    form: type[msgspec.Struct] | None = None,
    form_type: str = FORM,
    query: type[msgspec.Struct] | None = None,
    status: int = 200,
    idempotent: bool = False,
    conditional: bool = False,
    body_required: bool = True,
    headers: Sequence[Parameter] = (),
    said: Said | None = None,
) -> type[Operation]:
    """Describe an operation, which is made when the document is.

    `answer` None: none. `idempotent`: a POST, which honours Idempotency-Key. `conditional`: it
    honours If-Match. `headers`: what it reads beside these. `said`: all that it answers besides,
    but for what `openapi` knows by its path, its scope and what it takes.
    """
    answers: Said = {status: {} if answer is None else {JSON: answer}, **(said or {})}
    kinds = [one for by in answers.values() for each in by.values() for one in each_of(each)]
    _described.extend(each for each in (*kinds, *each_of(body), form) if each is not None)
    read = [*headers, *([IDEMPOTENCY_KEY] if idempotent else ())]
    read += [IF_MATCH] if conditional else []

    class DescribedOperation(DocumentedOperation):
        def __post_init__(self) -> None:
            added = [] if query is None else parameters(query)
            self.parameters = [*(self.parameters or []), *added, *read]
            self.responses = {
                str(code): to_response(by, tagged=conditional and code == status)
                for code, by in answers.items()
            }
            taken = {} if body is None else content(body)
            taken |= {} if form is None else content(form, form_type)
            if taken:
                self.request_body = RequestBody(required=body_required, content=taken)

    return DescribedOperation


def to_response(by_type: Mapping[str, Any], *, tagged: bool) -> OpenAPIResponse:
    found: dict[str, OpenAPIMediaType] = {}
    for media_type, kind in by_type.items():
        found |= content(kind, media_type)
    return OpenAPIResponse(
        description="Done.", content=found or None, headers={"ETag": ETAG} if tagged else None
    )


@dataclass(frozen=True, kw_only=True)
class RouteGroup:
    """A group of routes that share a tag, a scope and the headers that they read. Its methods make
    handlers; they take what `describes` takes."""

    tag: str
    opt: Mapping[str, Any]
    headers: tuple[Parameter, ...] = ()
    guards: tuple[Guard, ...] = ()
    """They ask of a request more than its scope."""

    def get(self, path: str | list[str], summary: str, **described: Any) -> HTTPRouteHandler:
        return self.route("GET", path, summary, **described)

    def post(self, path: str | list[str], summary: str, **described: Any) -> HTTPRouteHandler:
        return self.route("POST", path, summary, **described)

    def delete(self, path: str, summary: str, **described: Any) -> HTTPRouteHandler:
        return self.route("DELETE", path, summary, **described)

    def route(
        self,
        method: Literal["GET", "POST", "DELETE"] | list[Literal["GET", "POST"]],
        path: str | list[str],
        summary: str,
        *,
        headers: Sequence[Parameter] = (),
        status: int = 200,
        handler: type[HTTPRouteHandler] = HTTPRouteHandler,
        options: Mapping[str, Any] | None = None,
        **described: Any,
    ) -> HTTPRouteHandler:
        """Make a handler. `options`: what Litestar is told besides, such as a bound on the body."""
        operation = describes(status=status, headers=(*self.headers, *headers), **described)
        return handler(
            path,
            http_method=method,
            opt=self.opt,
            guards=list(self.guards),
            tags=[self.tag],
            summary=summary,
            operation_class=operation,
            **{"status_code": status, **(options or {})},
        )
