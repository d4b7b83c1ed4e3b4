"""Shows the texts of one request, where its project stores them: GET /v1/requests/{id}/content.

For keys with `admin:content`, in people's hands for owners and admins of the organization and for
owners of the project; each reading is in the audit log. Others are told that there are texts, never
what they say.
"""

from __future__ import annotations

import msgspec
from litestar import Response
from litestar.params import FromPath

from gateway.auth.errors import MissingScope
from gateway.db import tenant
from gateway.permissions import SCOPE_CONTENT
from gateway.principal import SCOPE_USAGE_READ
from gateway.request_log.content import RequestContent
from gateway.request_log.content_reading import find_content, may_read
from gateway.request_log.search import find_request
from gateway.routes.shared.access import AuthenticatedRequest, actor_of, needs, services
from gateway.routes.shared.media_types import JSON
from gateway.routes.shared.operations import ErrorEnvelope, RouteGroup
from gateway.tenancy.errors import NotFound


class ContentView(msgspec.Struct, frozen=True, kw_only=True):
    """The texts of a request. `is_cut`: something is beyond the bound, and missing."""

    object: str = "request.content"
    id: str
    project_id: str
    is_cut: bool
    content: RequestContent


group = RouteGroup(tag="Own view", opt=needs(SCOPE_USAGE_READ))


@group.get(
    "/v1/requests/{request_id:str}/content",
    "What one request of the organization asked and was answered, where its project stores that",
    answer=ContentView,
    said={403: {JSON: ErrorEnvelope}, 404: {JSON: ErrorEnvelope}},
)
async def content(request: AuthenticatedRequest, request_id: FromPath[str]) -> Response[bytes]:
    org_id, found = request.user.org_id, services(request)
    async with tenant(found.db, org_id) as conn:
        row = await find_request(conn, org_id, request_id)
        if row is None or not row.has_content:
            raise NotFound("request_id", "no texts are stored of such a request")
        if not may_read(request.user, row.project):
            raise MissingScope(SCOPE_CONTENT)
        texts = await find_content(
            conn, found.content_log.cipher, org_id, row.id, reader=actor_of(request)
        )
    if texts is None:
        raise NotFound("request_id", "no texts are stored of such a request")
    view = ContentView(
        id=f"req_{row.id}", project_id=row.project, is_cut=texts.is_cut, content=texts
    )
    return Response(msgspec.json.encode(view), media_type=JSON)


routes = [content]
