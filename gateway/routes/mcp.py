"""/mcp/{org}: the MCP endpoint of an org, as a protected resource. Its tools come later; who may
call them is decided from now on.

Above: `app`. Below: `auth.guards`, `protected_resources`. A token is good here when it
was issued for this very URL, for somebody of this very org. Every refusal says, in its
`WWW-Authenticate`, where a client finds out how to get a token that is.
"""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.connection import ASGIConnection
from litestar.exceptions import MethodNotAllowedException
from litestar.handlers import BaseRouteHandler

from gateway.auth.errors import InvalidToken
from gateway.auth.policy import SCOPE_MCP_CALL
from gateway.errors import to_face
from gateway.principal import Principal
from gateway.routes.access import ANY_AUDIENCE, AUDIENCE, needs
from gateway.routes.body import plain_body
from gateway.routes.media_types import JSON
from gateway.routes.operations import ErrorEnvelope, describes
from gateway.routes.protected_resources import challenged, public_url

PATH = "/mcp/{org_id:str}"
METHODS_UNKNOWN_ARE_404_FROM = "2026-07-28"
"""The revision of the protocol in which an unknown method has a status of its own."""
PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND = -32700, -32600, -32601


class Call(msgspec.Struct, frozen=True):
    """What of a JSON-RPC 2.0 message decides how it is answered."""

    jsonrpc: str
    method: str | None = None
    id: str | int | None = None


class RpcError(msgspec.Struct, frozen=True):
    code: int
    message: str


class RpcAnswer(msgspec.Struct, frozen=True, kw_only=True):
    jsonrpc: str = "2.0"
    id: str | int | None
    error: RpcError


async def check_audience(
    connection: ASGIConnection[Any, Principal, Any, Any], _handler: BaseRouteHandler
) -> None:
    """An API key is for all that is its org's; a token is for what it names. Raises:
    InvalidToken."""
    principal = connection.user
    path = connection.scope["path"].removesuffix("/")
    meant = principal.kind == "key" or public_url(connection) + path in principal.audiences
    if not meant or path != f"/mcp/{principal.org_id}":
        raise InvalidToken("issued for another resource")


def refuse(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """As everywhere, with the challenge on each 401 and 403."""
    face = to_face(error)
    headers = dict(face.headers)
    if face.status in (401, 403):
        headers |= challenged(request, error, SCOPE_MCP_CALL)
    return Response(face.encode(), status_code=face.status, headers=headers, media_type=JSON)


GUARDED: dict[str, Any] = {
    "path": PATH,
    "opt": {**needs(SCOPE_MCP_CALL), AUDIENCE: ANY_AUDIENCE},  # `check_audience` is stricter
    "guards": [check_audience],
    "exception_handlers": {Exception: refuse},
    "tags": ["MCP"],
}


@post(
    **GUARDED,
    status_code=200,
    summary="A message of the Model Context Protocol",
    operation_class=describes(
        body=Call,
        answer=RpcAnswer,
        said={202: {}, 400: {JSON: RpcAnswer}, 404: {JSON: RpcAnswer}},
    ),
)
async def call(request: Request[Principal, Any, Any]) -> Response[bytes]:
    try:
        message = msgspec.json.decode(await plain_body(request), type=Call)
    except msgspec.ValidationError:
        return rpc_error(400, None, INVALID_REQUEST, "Invalid Request")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return rpc_error(400, None, PARSE_ERROR, "Parse error")
    if message.method is None or message.id is None:
        return Response(b"", status_code=202)  # a notification, or an answer to nothing
    version = request.headers.get("mcp-protocol-version", "")
    status = 404 if version >= METHODS_UNKNOWN_ARE_404_FROM else 200
    return rpc_error(status, message.id, METHOD_NOT_FOUND, "Method not found")


def rpc_error(status: int, id: str | int | None, code: int, message: str) -> Response[bytes]:
    body = msgspec.json.encode(RpcAnswer(id=id, error=RpcError(code, message)))
    return Response(body, status_code=status, media_type=JSON)


NOT_OFFERED = describes(status=405, answer=ErrorEnvelope)


@get(**GUARDED, summary="Not offered: there is no stream to listen to", operation_class=NOT_OFFERED)
async def listen(request: Request[Principal, Any, Any]) -> None:
    raise MethodNotAllowedException(headers={"allow": "POST"})


@delete(
    **GUARDED,
    status_code=200,
    summary="Not offered: there is no session to end",
    operation_class=NOT_OFFERED,
)
async def end_session(request: Request[Principal, Any, Any]) -> None:
    raise MethodNotAllowedException(headers={"allow": "POST"})


routes = [call, listen, end_session]
