"""/v1/admin/orgs: the organizations of the installation, for operators. A new one comes with the
one way into it: an invite for its first owner, or else an admin key.

Every change is told in the org's own audit log and in the operator's.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from litestar import Response
from msgspec.structs import replace
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.db import tenant
from gateway.net.mail import invitation
from gateway.principal import SCOPE_ADMIN, SCOPE_USAGE_READ
from gateway.routes.oauth.protected_resources import public_url
from gateway.routes.shared.access import needs
from gateway.routes.shared.resource import AdminRequest, AdminResource, require_unbound, show_once
from gateway.tenancy import orgs as verbs
from gateway.tenancy.errors import ReadOnly
from gateway.tenancy.keys.keys import create_key
from gateway.tenancy.members.invites import create_invite, to_link
from gateway.tenancy.orgs import Org
from gateway.tenancy.projects import create_project
from gateway.tenancy.tables import orgs as table
from gateway.wire.admin.orgs import CreatedOrg, FirstInvite, FirstKey, NewOrg, OrgPatch, OrgView
from gateway.wire.shared.page_query import ArchivedPageQuery
from gateway.wire.shared.resource import view_of

FIRST_PROJECT = "default"
FIRST_KEY = "admin"


def to_view(org: Org) -> OrgView:
    return view_of(OrgView, org)


def select_orgs(_org_id: str, query: ArchivedPageQuery) -> sa.Select[Any]:
    listed = sa.select(table)
    return listed if query.include_archived else listed.where(table.c.archived_at.is_(None))


orgs = AdminResource[Org](
    path="/v1/admin/orgs",
    id_name="org_id",
    tag="Organizations",
    read=needs("operator:orgs"),
    change=needs("operator:orgs"),
    view=OrgView,
    show=to_view,
    in_system=True,
    checks_ids=False,
)

list_ = orgs.list_all(
    "List the organizations",
    ArchivedPageQuery,
    select=select_orgs,
    row=Org,
)

retrieve = orgs.retrieve("One organization", verbs.get_org)


@orgs.create("Create an organization, with an invite or an admin key", NewOrg, answer=CreatedOrg)
async def create(request: AdminRequest, wanted: NewOrg) -> Response[bytes]:
    require_unbound(request.user)
    actor, operator_org = request.actor, request.user.org_id
    async with tenant(request.system_db, operator_org) as conn:
        org = await verbs.create_org(
            conn, name=wanted.name, plan=wanted.plan, actor=actor, operator_org=operator_org
        )
        await create_project(conn, org_id=org.id, name=FIRST_PROJECT, actor=actor)
        if wanted.owner_email is None:
            key = await first_key(conn, request, org)
            made = CreatedOrg(organization=to_view(org), admin_key=key)
        else:
            invite = await first_invite(conn, request, org, wanted.owner_email)
            made = CreatedOrg(organization=to_view(org), owner_invite=invite)
    if (shown := made.owner_invite) is not None:  # the link leads somewhere by now
        mail = await request.services.mailer.send(invitation(shown.email, shown.url, "owner"))
        made = replace(made, owner_invite=replace(shown, mail=mail))
    return show_once(request, made, status=201)


async def first_key(conn: AsyncConnection, request: AdminRequest, org: Org) -> FirstKey:
    pepper_id, pepper = request.services.authenticator.pepper
    made = await create_key(
        conn,
        org_id=org.id,
        project_id=None,
        name=FIRST_KEY,
        scopes=[SCOPE_ADMIN, SCOPE_USAGE_READ],
        pepper=pepper,
        pepper_id=pepper_id,
        actor=request.actor,
    )
    return FirstKey(id=made.row.id, value=made.secret)


async def first_invite(
    conn: AsyncConnection, request: AdminRequest, org: Org, email: str
) -> FirstInvite:
    made = await create_invite(
        conn,
        org_id=org.id,
        email=email,
        role="owner",
        projects=[],
        secret=request.services.authorization.secret,
        actor=request.actor,
    )
    url = to_link(public_url(request.http), made.token)
    return view_of(FirstInvite, made.invite, url=url, mail="not_configured")


@orgs.update("Rename an organization, or give it another plan", OrgPatch)
async def update(request: AdminRequest, values: dict[str, Any]) -> Org:
    return await verbs.update_org(
        request.system_db, request.redis, request.id, values, **by_operator(request)
    )


@orgs.archive("Archive an organization: its credentials stop working")
async def archive(request: AdminRequest) -> Org:
    """Archive an org; an operator cannot archive their own."""
    if request.id == request.user.org_id:
        raise ReadOnly("org", "the organization of this credential cannot archive itself")
    return await verbs.archive_org(
        request.system_db, request.redis, request.id, **by_operator(request)
    )


@orgs.act("/lift-suspension", "Serve an organization again that has not paid its invoices")
async def lift(request: AdminRequest) -> Org:
    return await verbs.lift_suspension(
        request.system_db, request.redis, request.id, **by_operator(request)
    )


def by_operator(request: AdminRequest) -> dict[str, Any]:
    return {
        "actor": request.actor,
        "operator_org": request.user.org_id,
        "check": request.check,
    }


routes = [create, list_, retrieve, update, archive, lift]
