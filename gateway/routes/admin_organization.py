"""/v1/admin/organization: the caller's own organization, and from which web pages browsers may call
with its credentials.

Above: `app`. Below: `tenancy.orgs`, `tenancy.origins`. Its name and its plan are an operator's to
change (`admin_orgs`).
"""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, Response, get, patch
from msgspec import UnsetType

from gateway.auth.policy import SCOPE_ADMIN_READ
from gateway.db import tenant
from gateway.principal import Principal
from gateway.routes.access import actor_of, needs, services
from gateway.routes.admin_orgs import to_view, unless_changed
from gateway.routes.chat import plain_body
from gateway.routes.conditional import answer, if_match
from gateway.routes.operations import describes
from gateway.tenancy.orgs import get_org
from gateway.tenancy.origins import update_origins
from gateway.wire.admin_orgs import OrgView
from gateway.wire.admin_tenant import OrganizationPatch
from gateway.wire.refusals import decode

PATH = "/v1/admin/organization"
CHANGE = needs("admin:clients")
"""Pages of other origins are clients of the org's, as those are that sign users in."""
TAGS = ["Organizations"]
Asked = Request[Principal, Any, Any]
_patch_decoder = msgspec.json.Decoder(OrganizationPatch)


@get(
    PATH,
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="The organization of this credential",
    operation_class=describes(answer=OrgView),
)
async def retrieve(request: Asked) -> Response[bytes]:
    org_id = request.user.org_id
    async with tenant(services(request).db, org_id) as conn:
        org = await get_org(conn, org_id)
    return answer(request, to_view(org))


@patch(
    PATH,
    opt=CHANGE,
    tags=TAGS,
    summary="List the origins of web pages whose browsers may call; none: no page of another",
    operation_class=describes(body=OrganizationPatch, answer=OrgView, conditional=True),
)
async def update(request: Asked) -> Response[bytes]:
    """Every worker goes by it within half a minute (`auth.cors_origins`)."""
    check = unless_changed(if_match(request))
    wanted = decode(_patch_decoder, await plain_body(request)).cors_origins
    org = await update_origins(
        services(request).db,
        request.user.org_id,
        None if isinstance(wanted, UnsetType) else wanted,
        actor=actor_of(request),
        check=check,
    )
    return answer(request, to_view(org))


routes = [retrieve, update]
