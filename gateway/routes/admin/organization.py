"""/v1/admin/organization: the caller's own organization, from which web pages browsers may call
with its credentials, and whether its answers say what they cost.

Its name and its plan are an operator's to change (`orgs`).
"""

from __future__ import annotations

import msgspec
from litestar import Response, get, patch

from foundation.structs import given
from gateway.db import tenant
from gateway.permissions import SCOPE_ADMIN_READ
from gateway.routes.admin.orgs import to_view, unless_changed
from gateway.routes.shared.access import AuthenticatedRequest, actor_of, needs, services
from gateway.routes.shared.body import plain_body
from gateway.routes.shared.conditional import answer, if_match
from gateway.routes.shared.operations import describes
from gateway.tenancy.keys.restrictions import check_origins
from gateway.tenancy.orgs import get_org, update_org
from gateway.wire.admin.orgs import OrgView
from gateway.wire.admin.tenant import OrganizationPatch
from gateway.wire.shared.refusals import decode_kept

PATH = "/v1/admin/organization"
CHANGE = needs("admin:clients")
"""Pages of other origins are clients of the org's, as those are that sign users in."""
TAGS = ["Organizations"]
_patch_decoder = msgspec.json.Decoder(OrganizationPatch)


@get(
    PATH,
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="The organization of this credential",
    operation_class=describes(answer=OrgView),
)
async def retrieve(request: AuthenticatedRequest) -> Response[bytes]:
    org_id = request.user.org_id
    async with tenant(services(request).db, org_id) as conn:
        org = await get_org(conn, org_id)
    return answer(request, to_view(org))


@patch(
    PATH,
    opt=CHANGE,
    tags=TAGS,
    summary="Say which web pages' browsers may call, by origin, and whether answers say their cost",
    operation_class=describes(body=OrganizationPatch, answer=OrgView, conditional=True),
)
async def update(request: AuthenticatedRequest) -> Response[bytes]:
    """Every worker goes by origins within half a minute (`auth.cors_origins`)."""
    check = unless_changed(if_match(request))
    values = given(decode_kept(_patch_decoder, await plain_body(request)))
    if "cors_origins" in values:
        values["cors_origins"] = check_origins(values["cors_origins"])
    found = services(request)
    org = await update_org(
        found.db, found.redis, request.user.org_id, values, actor=actor_of(request), check=check
    )
    return answer(request, to_view(org))


routes = [retrieve, update]
