"""/v1/admin/orgs: the organizations of the installation, for operators. A new one comes with the
one way into it: an invite for its first owner, or else an admin key.

Every change is told in the org's own audit log and in the operator's.
"""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa
from litestar import Response, get, patch, post
from litestar.params import FromPath
from sqlalchemy.ext.asyncio import AsyncConnection

from foundation.structs import given
from gateway.audit.log import Actor
from gateway.db import tenant
from gateway.principal import SCOPE_ADMIN, SCOPE_USAGE_READ
from gateway.routes.oauth.protected_resources import public_url
from gateway.routes.shared.access import AuthenticatedRequest, actor_of, needs, services
from gateway.routes.shared.body import plain_body
from gateway.routes.shared.common_requests import require_unbound
from gateway.routes.shared.conditional import Precondition, answer, if_match
from gateway.routes.shared.operations import describes
from gateway.routes.shared.pages import Listing, PageQuery, keyset, to_listing
from gateway.routes.shared.services import Services
from gateway.tenancy import orgs as verbs
from gateway.tenancy.errors import ReadOnly
from gateway.tenancy.keys.keys import create_key
from gateway.tenancy.members.invites import create_invite, to_link
from gateway.tenancy.orgs import Check, Org
from gateway.tenancy.projects import create_project
from gateway.tenancy.tables import orgs as table
from gateway.wire.admin.orgs import (
    CreatedOrg,
    FirstInvite,
    FirstKey,
    NewOrg,
    OrgPatch,
    OrgView,
)
from gateway.wire.admin.plans import to_seconds
from gateway.wire.organization.usage import parse_query
from gateway.wire.shared.refusals import decode_kept

SCOPE = "operator:orgs"
TAGS = ["Organizations"]
FIRST_PROJECT = "default"
FIRST_KEY = "admin"
NO_STORE = {"cache-control": "no-store"}
_new_decoder = msgspec.json.Decoder(NewOrg)
_patch_decoder = msgspec.json.Decoder(OrgPatch)


class OrgsQuery(PageQuery):
    include_archived: bool = False


def to_view(org: Org) -> OrgView:
    fields: dict[str, Any] = msgspec.structs.asdict(org)
    names = ("created_at", "archived_at", "suspension_lifted_at")
    moments = {name: to_seconds(fields[name]) for name in names}
    return OrgView(**{**fields, **moments})


def unless_changed(precondition: Precondition) -> Check:
    return lambda org: precondition.check(to_view(org))


@post(
    "/v1/admin/orgs",
    opt=needs(SCOPE),
    tags=TAGS,
    summary="Create an organization, with an invite or an admin key",
    operation_class=describes(body=NewOrg, answer=CreatedOrg, status=201, idempotent=True),
)
async def create(request: AuthenticatedRequest) -> Response[bytes]:
    require_unbound(request.user)
    wanted = decode_kept(_new_decoder, await plain_body(request))
    actor, operator_org = actor_of(request), request.user.org_id
    found = services(request)
    async with tenant(found.system_db, operator_org) as conn:
        org = await verbs.create_org(
            conn, name=wanted.name, plan=wanted.plan, actor=actor, operator_org=operator_org
        )
        await create_project(conn, org_id=org.id, name=FIRST_PROJECT, actor=actor)
        email, view = wanted.owner_email, to_view(org)
        if email is None:
            key = await first_key(conn, found, org, actor)
            made = CreatedOrg(organization=view, admin_key=key)
        else:
            invite = await first_invite(conn, request, org, actor, email)
            made = CreatedOrg(organization=view, owner_invite=invite)
    return answer(request, made, status=201, headers=NO_STORE)


async def first_key(conn: AsyncConnection, found: Services, org: Org, actor: Actor) -> FirstKey:
    pepper_id, pepper = found.authenticator.pepper
    made = await create_key(
        conn,
        org_id=org.id,
        project_id=None,
        name=FIRST_KEY,
        scopes=[SCOPE_ADMIN, SCOPE_USAGE_READ],
        pepper=pepper,
        pepper_id=pepper_id,
        actor=actor,
    )
    return FirstKey(id=made.row.id, value=made.secret)


async def first_invite(
    conn: AsyncConnection, request: AuthenticatedRequest, org: Org, actor: Actor, email: str
) -> FirstInvite:
    found = services(request)
    made = await create_invite(
        conn,
        org_id=org.id,
        email=email,
        role="owner",
        projects=[],
        secret=found.authorization.secret,
        actor=actor,
    )
    return FirstInvite(
        id=made.invite.id,
        email=made.invite.email,
        url=to_link(public_url(request), made.token),
        expires_at=int(made.invite.expires_at.timestamp()),
    )


@get(
    "/v1/admin/orgs",
    opt=needs(SCOPE),
    tags=TAGS,
    summary="List the organizations",
    operation_class=describes(query=OrgsQuery, answer=Listing[OrgView]),
)
async def list_(request: AuthenticatedRequest) -> Response[bytes]:
    query = parse_query(request.url.query, OrgsQuery)
    listed = sa.select(table)
    if not query.include_archived:
        listed = listed.where(table.c.archived_at.is_(None))
    async with services(request).system_db.connect() as conn:
        rows = await conn.execute(keyset(listed, table.c.id, query))
        found = [to_view(Org(**row._mapping)) for row in rows]
    return answer(request, to_listing(found, query))


@get(
    "/v1/admin/orgs/{org_id:str}",
    opt=needs(SCOPE),
    tags=TAGS,
    summary="One organization",
    operation_class=describes(answer=OrgView),
)
async def retrieve(request: AuthenticatedRequest, org_id: FromPath[str]) -> Response[bytes]:
    async with services(request).system_db.connect() as conn:
        org = await verbs.get_org(conn, org_id)
    return answer(request, to_view(org))


@patch(
    "/v1/admin/orgs/{org_id:str}",
    opt=needs(SCOPE),
    tags=TAGS,
    summary="Rename an organization, or give it another plan",
    operation_class=describes(body=OrgPatch, answer=OrgView, conditional=True),
)
async def update(request: AuthenticatedRequest, org_id: FromPath[str]) -> Response[bytes]:
    check = unless_changed(if_match(request))
    values = given(decode_kept(_patch_decoder, await plain_body(request)))
    found = services(request)
    org = await verbs.update_org(
        found.system_db,
        found.redis,
        org_id,
        values,
        actor=actor_of(request),
        operator_org=request.user.org_id,
        check=check,
    )
    return answer(request, to_view(org))


@post(
    "/v1/admin/orgs/{org_id:str}/archive",
    opt=needs(SCOPE),
    status_code=200,
    tags=TAGS,
    summary="Archive an organization: its credentials stop working",
    operation_class=describes(answer=OrgView, idempotent=True, conditional=True),
)
async def archive(request: AuthenticatedRequest, org_id: FromPath[str]) -> Response[bytes]:
    """Archive an org; an operator cannot archive their own."""
    if org_id == request.user.org_id:
        raise ReadOnly("org", "the organization of this credential cannot archive itself")
    found = services(request)
    org = await verbs.archive_org(
        found.system_db,
        found.redis,
        org_id,
        actor=actor_of(request),
        operator_org=request.user.org_id,
        check=unless_changed(if_match(request)),
    )
    return answer(request, to_view(org))


@post(
    "/v1/admin/orgs/{org_id:str}/lift-suspension",
    opt=needs(SCOPE),
    status_code=200,
    tags=TAGS,
    summary="Serve an organization again that has not paid its invoices",
    operation_class=describes(answer=OrgView, idempotent=True, conditional=True),
)
async def lift(request: AuthenticatedRequest, org_id: FromPath[str]) -> Response[bytes]:
    found = services(request)
    org = await verbs.lift_suspension(
        found.system_db,
        found.redis,
        org_id,
        actor=actor_of(request),
        operator_org=request.user.org_id,
        check=unless_changed(if_match(request)),
    )
    return answer(request, to_view(org))


routes = [create, list_, retrieve, update, archive, lift]
