"""/mcp/{org}: the MCP endpoint of an org, as a protected resource; and /mcp/{org}/{project} and
/mcp/{org}/{project}/{namespace}, parts of it. /mcp alone is that of the credential's org. Both are
ids or the names that people know.

A token is good here when it was issued for the endpoint of this very org, for somebody of it; at
/mcp, and where the org is named, also one for the whole installation. Every refusal says, in its
`WWW-Authenticate`, where a client finds out how to get a token that is. Where no servers are
configured every method is unknown.
"""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, Response, delete, get
from litestar.connection import ASGIConnection
from litestar.exceptions import MethodNotAllowedException
from litestar.handlers import BaseRouteHandler
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.auth.errors import WrongOrganization, WrongResource
from gateway.http_errors.table import to_http_error
from gateway.mcp.service.service import McpService
from gateway.permissions import SCOPE_MCP_CALL
from gateway.principal import Principal
from gateway.routes.oauth.protected_resources import challenged, public_url
from gateway.routes.shared.access import (
    ANY_AUDIENCE,
    AUDIENCE,
    AuthenticatedRequest,
    HotRoute,
    needs,
    services,
)
from gateway.routes.shared.body import plain_body
from gateway.routes.shared.media_types import JSON
from gateway.routes.shared.operations import ErrorEnvelope, describes

ROOT = "/mcp"
PATHS = [
    ROOT,
    ROOT + "/{org_id:str}",
    ROOT + "/{org_id:str}/{project_id:str}",
    ROOT + "/{org_id:str}/{project_id:str}/{namespace:str}",
]
METHODS_UNKNOWN_ARE_404_FROM = "2026-07-28"
"""The revision of the protocol in which an unknown method has a status of its own."""
PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND = -32700, -32600, -32601


class RpcCall(msgspec.Struct, frozen=True):
    """The fields of a JSON-RPC 2.0 message that decide how it is answered."""

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
    """Check what a credential is for: an API key is for all of its org, a token for what it names.

    An org and a project may be named as people know them. An org's name is no resource, so a token
    is good there if it is at /mcp. What is said to a valid credential depends on its own org alone:
    nobody learns which others there are.

    Raises: WrongResource, WrongOrganization.
    """
    principal = connection.user
    base, (org, project, _) = public_url(connection), parts_of(connection)
    mine = f"{ROOT}/{principal.org_id}"
    good = {base + mine}
    if org in (None, principal.org_name):
        good.add(base)
    if principal.kind != "key" and good.isdisjoint(principal.audiences):
        raise WrongResource("issued for another resource")
    if org not in (None, principal.org_id, principal.org_name or None):
        raise WrongOrganization(mine)
    if project not in (None, principal.project_id, principal.project_name or None):
        of_project = f"{mine}/{principal.project_id}" if principal.project_id else mine
        raise WrongOrganization(of_project)


def parts_of(
    connection: ASGIConnection[Any, Any, Any, Any],
) -> tuple[str | None, str | None, str | None]:
    """Return the org, the project and the namespace of the path."""
    found = connection.scope["path"].removesuffix("/").removeprefix(ROOT).split("/")[1:]
    org_id, project_id, namespace = [*found, None, None, None][:3]
    return org_id, project_id, namespace


def refuse(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Refuse as everywhere, with the challenge on each 401 and 403."""
    http_error = to_http_error(error)
    headers = dict(http_error.headers)
    if http_error.status in (401, 403):
        headers |= challenged(request, error, SCOPE_MCP_CALL)
    return Response(
        http_error.encode(), status_code=http_error.status, headers=headers, media_type=JSON
    )


GUARDED: dict[str, Any] = {
    "path": PATHS,
    "opt": {**needs(SCOPE_MCP_CALL), AUDIENCE: ANY_AUDIENCE},  # `check_audience` is stricter
    "guards": [check_audience],
    "exception_handlers": {Exception: refuse},
    "tags": ["MCP"],
}


@HotRoute(
    **GUARDED,
    http_method="POST",
    status_code=200,
    summary="A message of the Model Context Protocol",
    operation_class=describes(
        body=RpcCall,
        answer=RpcAnswer,
        said={202: {}, 400: {JSON: RpcAnswer}, 404: {JSON: RpcAnswer}},
    ),
)
async def call(request: AuthenticatedRequest) -> ASGIApp:
    service = services(request).mcp
    if service is not None:
        return await pass_on(service, request)
    return (await refuse_method(request)).to_asgi_response(None, request)


async def pass_on(service: McpService, request: AuthenticatedRequest) -> ASGIApp:
    """Pass on an answer that takes its own time, and says itself what it is."""
    principal, (_, _, namespace) = request.user, parts_of(request)
    principal.check_served()
    origin = request.headers.get("origin")
    pages: set[str] = set()
    if origin is not None and principal.org_id in await services(request).cors_origins.orgs_of(
        origin
    ):
        pages = {origin}

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await service.serve(principal, namespace, pages, scope, receive, send)

    return answer


async def refuse_method(request: AuthenticatedRequest) -> Response[bytes]:
    """Refuse a method, in an installation that has no servers to ask."""
    try:
        message = msgspec.json.decode(await plain_body(request), type=RpcCall)
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


OFFERED = describes(
    answer=None, said={404: {JSON: RpcAnswer}, 405: {JSON: ErrorEnvelope}, 400: {JSON: RpcAnswer}}
)


@get(
    **GUARDED,
    summary="What servers say outside of requests, as a stream, to a session of the older era",
    operation_class=OFFERED,
)
async def listen(request: AuthenticatedRequest) -> ASGIApp:
    service = services(request).mcp
    if service is None:
        raise MethodNotAllowedException(headers={"allow": "POST"})
    return await pass_on(service, request)


@delete(
    **GUARDED,
    status_code=200,
    summary="End a session of the older era",
    operation_class=OFFERED,
)
async def end_session(request: AuthenticatedRequest) -> ASGIApp:
    service = services(request).mcp
    if service is None:
        raise MethodNotAllowedException(headers={"allow": "POST"})
    return await pass_on(service, request)


routes = [call, listen, end_session]
