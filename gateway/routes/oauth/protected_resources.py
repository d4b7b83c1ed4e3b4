"""RFC 9728 metadata of our resources: the installation, its API, one MCP endpoint for each org; and
the challenges of refusals, which lead there.

For the whole world, pages of any origin included: a client reads it before it has anything to show.
"""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, Response
from litestar.connection import ASGIConnection
from litestar.exceptions import NotFoundException
from litestar.params import FromPath

from gateway.auth.errors import MissingScope
from gateway.auth.oauth.rfc9728_protected_resource import (
    WELL_KNOWN,
    ProtectedResource,
    challenge,
    find_error,
    find_metadata,
)
from gateway.auth.resources import API_PATH
from gateway.routes.shared.access import PUBLIC, services
from gateway.routes.shared.media_types import JSON
from gateway.routes.shared.operations import RouteGroup
from gateway.tenancy.errors import NotFound
from gateway.tenancy.orgs import get_org

MCP_ROOT = "/mcp/"
HEADERS = {"cache-control": "public, max-age=3600"}
oauth = RouteGroup(tag="OAuth", opt=PUBLIC)


def public_url(connection: ASGIConnection[Any, Any, Any, Any]) -> str:
    """Return how clients reach the gateway, without a slash at its end."""
    found: str = connection.app.state.public_url
    return found


def challenged(
    request: ASGIConnection[Any, Any, Any, Any], error: Exception, scope: str | None = None
) -> dict[str, str]:
    """Return the header of a 401, and of a 403 for lack of a scope (RFC 6750, section 3), on
    whatever path. `scope`: the one that is wanted there, where it is one."""
    path = request.scope["path"].removesuffix("/")
    if path == API_PATH or path.startswith(API_PATH + "/"):
        path = API_PATH
    elif path.startswith(MCP_ROOT):
        path = "/".join(path.split("/")[:3])  # parts of an org's endpoint are that resource
    if find_metadata(path, "") is None:
        path = ""
    if isinstance(error, MissingScope):
        scope = error.scope
    shown = request.headers.get("authorization", "")[:5].lower()
    said = challenge(
        path,
        public_url(request),
        scope=scope,
        error=find_error(error),
        scheme="DPoP" if shown == "dpop " else "Bearer",
    )
    return {"www-authenticate": said}


def answer(path: str, request: Request[Any, Any, Any]) -> Response[bytes]:
    found = find_metadata(path, public_url(request))
    if found is None:
        raise NotFoundException
    return Response(msgspec.json.encode(found), media_type=JSON, headers=HEADERS)


@oauth.get(
    [WELL_KNOWN, WELL_KNOWN + API_PATH],
    "What the API is as a protected resource",
    answer=ProtectedResource,
)
async def api_metadata(request: Request[Any, Any, Any]) -> Response[bytes]:
    return answer(request.scope["path"].removeprefix(WELL_KNOWN).removesuffix("/"), request)


@oauth.get(
    WELL_KNOWN + "/mcp/{org_id:str}",
    "What an org's MCP endpoint is as a protected resource",
    answer=ProtectedResource,
)
async def mcp_metadata(request: Request[Any, Any, Any], org_id: FromPath[str]) -> Response[bytes]:
    """Answer as long as there is such an org: for an archived one nothing is left to ask for."""
    metadata = answer(f"/mcp/{org_id}", request)
    try:
        async with services(request).system_db.connect() as conn:
            org = await get_org(conn, org_id)
    except NotFound:
        raise NotFoundException from None
    if org.archived_at is not None:
        raise NotFoundException
    return metadata


routes = [api_metadata, mcp_metadata]
