"""The OpenAPI document at `/schema`: Litestar's view of the routes, msgspec's view of the bodies.

Bodies are read by our own decoders, so Litestar cannot see their types; they are added here as
components, straight from the structs that the decoders use (OpenAPI 3.1 is JSON Schema 2020-12).

How each route can refuse follows from its path, its scope and what it takes, so that no route has
to say it: `add_refusals` adds it. A route says for itself what it answers when all is well, and
what only it refuses with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache, partial
from http import HTTPStatus
from typing import Any

import msgspec
import yaml
from litestar import Litestar, Request, Router
from litestar.enums import OpenAPIMediaType, ScopeType
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin, YamlRenderPlugin
from litestar.openapi.spec import (
    Components,
    OpenAPI,
    OpenAPIHeader,
    OpenAPIResponse,
    Operation,
    Parameter,
    Reference,
    Schema,
    SecurityScheme,
    Tag,
)
from litestar.routes import BaseRoute, HTTPRoute
from litestar.serialization import encode_json, get_serializer
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.auth.oauth.rfc8414_metadata import AUTHORIZATION_PATH
from gateway.mcp.service.service import own_version
from gateway.routes.shared.access import PUBLIC, SCOPE
from gateway.routes.shared.conditional import KeptContent
from gateway.routes.shared.idempotency import PREFIXES
from gateway.routes.shared.media_types import HTML, JSON
from gateway.routes.shared.operations import (
    ETAG,
    IDEMPOTENCY_KEY,
    IF_MATCH,
    TEMPLATE,
    ErrorEnvelope,
    JsonSchema,
    content,
    described,
)
from gateway.routes.shared.problem import (
    MEDIA_TYPE,
    MESSAGES,
    Problem,
    speaks_anthropic,
    speaks_both,
    speaks_problems,
)
from gateway.wire.admin.oauth import OAuthErrorBody
from gateway.wire.anthropic.reports import OVERLOADED, AnthropicError, to_status

BODIES = frozenset({"POST", "PUT", "PATCH"})
CHANGES = BODIES | {"DELETE"}
OAUTH = "/oauth/"
SEALED = ("/v1/responses", "/v1/conversations/")
CONTENT = ("/content", "/results")
"""Paths with these endings return the content of a file or the results of a batch."""
REQUEST_HEADER_FIELDS_TOO_LARGE = 431
"""The connection's, which knows no paths and speaks to all in one shape."""
RETRY_AFTER = OpenAPIHeader(
    description="Seconds.", schema=JsonSchema(content={"type": "integer", "minimum": 1})
)
TEXT = JsonSchema(content={"type": "string"})
FIRST_TAGS = (
    *("Chat", "Responses", "Messages", "Completions", "Embeddings", "Models", "Files"),
    *("Batches", "Conversations", "Tokens", "MCP", "Own view"),
)
"""They stand first in a reference: users of models look for them, administrators for others."""


def add_refusals(document: OpenAPI, routes: Iterable[BaseRoute]) -> None:
    """Add the refusals of `routes` to each operation of their document; each stands there once,
    among the components."""
    shared: dict[str, OpenAPIResponse | Reference] = {}
    paths = document.paths or {}
    for route in routes:
        if isinstance(route, HTTPRoute) and route.path_format in paths:
            for handler in route.route_handlers:
                for method in sorted(map(str, handler.http_methods)):
                    operation = getattr(paths[route.path_format], method.lower(), None)
                    if isinstance(operation, Operation):
                        refuse(operation, handler, method, route.path_format, shared)
    document.components.responses = dict(sorted(shared.items()))


def refuse(
    operation: Operation,
    handler: HTTPRouteHandler,
    method: str,
    path: str,
    shared: dict[str, OpenAPIResponse | Reference],
) -> None:
    responses = operation.responses = dict(operation.responses or {})
    if type(operation) is Operation:
        responses.pop("400", None)  # Litestar's guess, in a shape that nobody here writes
    parameters = [each for each in operation.parameters or [] if isinstance(each, Parameter)]
    if method == "GET":
        parameters = [each for each in parameters if each.name != IF_MATCH.name]
        if path.startswith(PREFIXES):
            unchanged = "What If-None-Match names is still current."
            responses["304"] = OpenAPIResponse(description=unchanged, headers={"ETag": ETAG})
    elif method == "POST" and is_administration(handler, path):
        parameters = [each for each in parameters if each.name != IDEMPOTENCY_KEY.name]
        parameters.append(IDEMPOTENCY_KEY)
    operation.parameters = in_order(parameters, path) or None
    said = set(statuses(operation, handler, method, path))
    those = {spoken_status(each, path) for each in said}
    if speaks_both(path):
        those |= {spoken_status(each, MESSAGES) for each in said}
    for status in sorted(those):
        if str(status) not in responses:
            kind, media_type = body_of_refusal(status, path)
            name = f"{name_of(kind)}{status}"
            if name not in shared:
                shared[name] = refusal(status, kind, media_type)
            responses[str(status)] = Reference(ref=f"#/components/responses/{name}")


def in_order(parameters: list[Parameter], path: str) -> list[Parameter | Reference]:
    """Return the parameters with those of the path first, as they stand there.

    Litestar keeps those that no handler names in a set, and takes the rest of a path for a URI.
    """
    in_path = [each for each in parameters if each.param_in == "path"]
    for each in in_path:
        each.schema = TEXT
    in_path.sort(key=lambda each: path.index(f"{{{each.name}}}"))
    return [*in_path, *(each for each in parameters if each.param_in != "path")]


def is_administration(handler: HTTPRouteHandler, path: str) -> bool:
    return path.startswith(PREFIXES) and handler.opt.get(SCOPE) is not None


def statuses(
    operation: Operation, handler: HTTPRouteHandler, method: str, path: str
) -> Iterator[int]:
    names = {each.name for each in operation.parameters or [] if isinstance(each, Parameter)}
    yield from (REQUEST_HEADER_FIELDS_TOO_LARGE, 500)
    if handler.opt.get(SCOPE) is not None:
        yield from (401, 403, 503)
    if "{" in path:
        yield from (400, 404)
    if handler.guards and speaks_both(path):
        yield 404  # to clients of the other vendor
    if path.startswith(SEALED) or path.endswith(CONTENT):
        yield 410  # its secret was removed, or the store of files has lost it
    if names:
        yield 400
    if operation.request_body is not None or (
        method in BODIES and is_administration(handler, path)
    ):
        yield from (400, 413, 415)
    if method in CHANGES and is_administration(handler, path):
        yield from (404, 409)
    if IDEMPOTENCY_KEY.name in names:
        yield from (409, 422 if is_administration(handler, path) else 400)
    if IF_MATCH.name in names:
        yield 412


def spoken_status(status: int, path: str) -> int:
    return to_status(status, None) if speaks_anthropic(path) else status


def body_of_refusal(status: int, path: str) -> tuple[Any, str]:
    """Return the type and the media type of its body."""
    if status == REQUEST_HEADER_FIELDS_TOO_LARGE:
        return ErrorEnvelope, JSON
    if speaks_problems(path):
        return Problem, MEDIA_TYPE
    if speaks_anthropic(path):
        return AnthropicError, JSON
    if speaks_both(path):
        return (ErrorEnvelope, AnthropicError), JSON
    if path == AUTHORIZATION_PATH:
        return str, HTML
    return (OAuthErrorBody if path.startswith(OAUTH) else ErrorEnvelope), JSON


def name_of(kind: Any) -> str:
    """Name a refusal among the components by the types of its body; `str` is a page."""
    names = [each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,))]
    return "Or".join("Page" if name == "str" else name for name in names)


def refusal(status: int, kind: Any, media_type: str) -> OpenAPIResponse:
    return OpenAPIResponse(
        description="Overloaded" if status == OVERLOADED else HTTPStatus(status).phrase,
        content=content(kind, media_type),
        headers={"Retry-After": RETRY_AFTER} if status in (429, 503, OVERLOADED) else None,
    )


@cache
def bodies() -> dict[str, Schema]:
    _, found = msgspec.json.schema_components(described(), ref_template=TEMPLATE)
    return {name: JsonSchema(content=content) for name, content in found.items()}


def complete(document: OpenAPI, routes: Iterable[BaseRoute]) -> None:
    """Add the components to Litestar's document of `routes`, which it writes from what it has seen
    itself, over those that were configured; and the refusals."""
    components = document.components
    components.schemas = {**(components.schemas or {}), **bodies()}
    add_refusals(document, routes)


class DocumentLayer:
    """Answers for the routes of the document, which Litestar would encode for each request.

    An ASGI layer around those routes alone; what is none of the document passes. What is written
    stands in the application's state: Litestar may hand one layer to several applications.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path_template", "")
        if scope["type"] != ScopeType.HTTP or path not in WRITERS:
            await self.app(scope, receive, send)
            return
        request: Request[Any, Any, Any] = Request(scope, receive)
        kept: KeptContent | None = request.app.state.get(path)
        if kept is None:
            write, media_type = WRITERS[path]
            kept = request.app.state[path] = KeptContent(partial(write, request.app), media_type)
        answered = (await kept.answer(request)).to_asgi_response(None, request)
        await answered(scope, receive, send)


def write_json(app: Litestar) -> bytes:
    schema = app.openapi_schema.to_schema()
    return encode_json(schema, serializer=get_serializer(app.type_encoders))


def write_yaml(app: Litestar) -> bytes:
    plain = msgspec.json.decode(write_json(app))
    return yaml.dump(plain, Dumper=yaml.CSafeDumper, sort_keys=False).encode()


WRITERS = {
    "/schema/openapi.json": (write_json, OpenAPIMediaType.OPENAPI_JSON),
    "/schema/openapi.yaml": (write_yaml, OpenAPIMediaType.OPENAPI_YAML),
    "/schema/openapi.yml": (write_yaml, OpenAPIMediaType.OPENAPI_YAML),
}


def openapi_config() -> OpenAPIConfig:
    bearer = SecurityScheme(
        type="http", scheme="bearer", description="An API key: `Authorization: Bearer sk-tg-...`"
    )
    return OpenAPIConfig(
        title="Tollgate",
        tags=[Tag(name=name) for name in FIRST_TAGS],
        version=own_version(),
        components=Components(security_schemes={"bearer": bearer}),
        security=[{"bearer": []}],
        render_plugins=[JsonRenderPlugin(), YamlRenderPlugin()],
        openapi_router=Router(
            path="/schema",
            route_handlers=[],
            opt=PUBLIC,
            include_in_schema=False,
            middleware=[DocumentLayer],
        ),
    )
