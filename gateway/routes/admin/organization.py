"""/v1/admin/organization: the caller's own organization, from which web pages browsers may call
with its credentials, and whether its answers say what they cost.

Its name and its plan are an operator's to change (`orgs`).
"""

from __future__ import annotations

from typing import Any

from gateway.routes.admin.orgs import to_view
from gateway.routes.shared.access import needs
from gateway.routes.shared.resource import AdminRequest, AdminResource
from gateway.tenancy.keys.restrictions import check_origins
from gateway.tenancy.orgs import Org, get_org, update_org
from gateway.wire.admin.orgs import OrgView
from gateway.wire.admin.tenant import OrganizationPatch

organization = AdminResource[Org](
    path="/v1/admin/organization",
    tag="Organizations",
    # Pages of other origins are clients of the org's, as those are that sign users in.
    change=needs("admin:clients"),
    view=OrgView,
    show=to_view,
)

retrieve = organization.retrieve("The organization of this credential", get_org)


@organization.update(
    "Say which web pages' browsers may call, by origin, and whether answers say their cost",
    OrganizationPatch,
)
async def update(request: AdminRequest, values: dict[str, Any]) -> Org:
    """Every worker goes by origins within half a minute (`auth.cors_origins`)."""
    if "cors_origins" in values:
        values["cors_origins"] = check_origins(values["cors_origins"])
    return await update_org(
        request.db,
        request.redis,
        request.org_id,
        values,
        actor=request.actor,
        check=request.check,
    )


routes = [retrieve, update]
