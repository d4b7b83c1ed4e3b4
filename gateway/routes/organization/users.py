"""/v1/organization/users and /invites: who belongs to an org, and who may come. OpenAI's shapes,
with five roles for a user where OpenAI has two.

Nobody gives or takes a role that has more than they have themselves. An invite's link stands in the
header `X-Tollgate-Invite-Link` of the answer that made it, since OpenAI's invite has no field for
it: nothing here sends e-mail.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import cast

from litestar import Response, delete, get, post
from litestar.params import FromPath
from msgspec import UnsetType
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.permissions import SCOPE_ADMIN_READ
from gateway.principal import Role
from gateway.routes.shared.access import AuthenticatedRequest, actor_of, needs, services
from gateway.routes.shared.common_requests import (
    body_of,
    changing_for,
    check_id,
    reading,
    require_appoint,
    show_once,
    to_cursor,
    to_listing,
)
from gateway.routes.shared.conditional import answer, if_match
from gateway.routes.shared.operations import describes
from gateway.routes.shared.pages import Listing
from gateway.tenancy.member_tables import check_role
from gateway.tenancy.members import invites, users
from gateway.tenancy.members.invites import Invite, ProjectGrant
from gateway.tenancy.members.users import Membership, User
from gateway.wire.organization import organization as wire
from gateway.wire.organization.organization import DeletedObject, ListQuery, read_query, to_unix

USERS = "/v1/organization/users"
USER = USERS + "/{user_id:str}"
INVITES = "/v1/organization/invites"
INVITE = INVITES + "/{invite_id:str}"
CHANGE = needs("admin:members")
READ = needs(SCOPE_ADMIN_READ)
INVITE_LINK = "x-tollgate-invite-link"


def to_user(user: User, member_of: list[Membership]) -> wire.OrganizationUser:
    return wire.OrganizationUser(
        id=user.id,
        email=user.email,
        name=user.name,
        role=user.role,
        added_at=to_unix(user.created_at),
        created=to_unix(user.created_at),
        user=wire.UserDetails(id=user.id, email=user.email, name=user.name),
        projects=wire.UserProjects(
            data=[
                wire.UserProject(id=each.project_id, name=each.name, role=each.role)
                for each in member_of
            ]
        ),
    )


async def _with_projects(conn: AsyncConnection, found: list[User]) -> list[wire.OrganizationUser]:
    if not found:
        return []
    ids = [user.id for user in found]
    by_user = await users.memberships(conn, org_id=found[0].org_id, user_ids=ids)
    return [to_user(user, by_user.get(user.id, [])) for user in found]


@get(
    USERS,
    opt=READ,
    tags=["Users"],
    summary="List the users",
    operation_class=describes(query=wire.UsersQuery, answer=Listing[wire.OrganizationUser]),
)
async def list_users(request: AuthenticatedRequest) -> Response[bytes]:
    query = read_query(request.url.query, wire.UsersQuery)
    async with reading(request) as conn:
        found, more = await users.list_users(
            conn, org_id=request.user.org_id, emails=query.emails, cursor=to_cursor(query)
        )
        data = await _with_projects(conn, found)
    return answer(request, to_listing(data, more))


@get(
    USER,
    opt=READ,
    tags=["Users"],
    summary="One user",
    operation_class=describes(answer=wire.OrganizationUser),
)
async def retrieve_user(request: AuthenticatedRequest, user_id: FromPath[str]) -> Response[bytes]:
    check_id("user_id", user_id)
    async with reading(request) as conn:
        found = await users.get_user(conn, org_id=request.user.org_id, user_id=user_id)
        [shown] = await _with_projects(conn, [found])
    return answer(request, shown)


@post(
    USER,
    opt=CHANGE,
    status_code=200,
    tags=["Users"],
    summary="Change a user's role; their credentials have its power, and no more, within a second",
    operation_class=describes(
        body=wire.UserUpdate,
        answer=wire.OrganizationUser,
        idempotent=True,
        conditional=True,
    ),
)
async def update_user(request: AuthenticatedRequest, user_id: FromPath[str]) -> Response[bytes]:
    check_id("user_id", user_id)
    body, precondition = await body_of(request, wire.UserUpdate), if_match(request)
    org_id = request.user.org_id
    async with changing_for(request, user_id) as conn:
        found = await users.lock_user(conn, org_id=org_id, user_id=user_id)
        precondition.check((await _with_projects(conn, [found]))[0])
        if body.role is not None and body.role != found.role:
            require_appoint(request.user, found.role, cast(Role, check_role(body.role)))
            found = await users.change_role(
                conn, org_id=org_id, user_id=user_id, role=body.role, actor=actor_of(request)
            )
        [shown] = await _with_projects(conn, [found])
    return answer(request, shown)


@delete(
    USER,
    opt=CHANGE,
    status_code=200,
    tags=["Users"],
    summary="Remove a user from the org",
    operation_class=describes(answer=DeletedObject, conditional=True),
)
async def delete_user(request: AuthenticatedRequest, user_id: FromPath[str]) -> Response[bytes]:
    check_id("user_id", user_id)
    precondition, org_id = if_match(request), request.user.org_id
    async with changing_for(request, user_id) as conn:
        found = await users.lock_user(conn, org_id=org_id, user_id=user_id)
        precondition.check((await _with_projects(conn, [found]))[0])
        require_appoint(request.user, found.role)
        await users.archive_user(conn, org_id=org_id, user_id=user_id, actor=actor_of(request))
    return answer(request, DeletedObject(id=user_id, object="organization.user.deleted"))


# ---- invites


def to_invite(invite: Invite) -> wire.InviteObject:
    return wire.InviteObject(
        id=invite.id,
        email=invite.email,
        role=invite.role,
        status=invite.status(datetime.now(tz=UTC)),
        projects=[wire.InvitedProject(id=each.id, role=each.role) for each in invite.projects],
        created_at=to_unix(invite.created_at),
        expires_at=to_unix(invite.expires_at),
        accepted_at=wire.to_unix_or_none(invite.accepted_at),
    )


@get(
    INVITES,
    opt=READ,
    tags=["Invites"],
    summary="List the invites",
    operation_class=describes(query=ListQuery, answer=Listing[wire.InviteObject]),
)
async def list_invites(request: AuthenticatedRequest) -> Response[bytes]:
    query = read_query(request.url.query, ListQuery)
    async with reading(request) as conn:
        found, more = await invites.list_invites(
            conn, org_id=request.user.org_id, cursor=to_cursor(query)
        )
    return answer(request, to_listing([to_invite(each) for each in found], more))


@post(
    INVITES,
    opt=CHANGE,
    status_code=200,
    tags=["Invites"],
    summary="Invite somebody; the header X-Tollgate-Invite-Link of the answer is their link",
    operation_class=describes(body=wire.InviteCreate, answer=wire.InviteObject, idempotent=True),
)
async def create_invite(request: AuthenticatedRequest) -> Response[bytes]:
    body, org_id = await body_of(request, wire.InviteCreate), request.user.org_id
    require_appoint(request.user, body.role)
    async with reading(request) as conn:
        if isinstance(body.projects, UnsetType):
            grants = await invites.default_projects(conn, org_id=org_id)
        else:
            for each in body.projects:
                check_id("projects", each.id)
            grants = [ProjectGrant(id=each.id, role=each.role) for each in body.projects]
        made = await invites.create_invite(
            conn,
            org_id=org_id,
            email=body.email,
            role=body.role,
            projects=grants,
            secret=services(request).authorization.secret,
            actor=actor_of(request),
        )
    response = show_once(request, to_invite(made.invite))
    response.headers[INVITE_LINK] = invites.to_link(request.app.state.public_url, made.token)
    return response


@get(
    INVITE,
    opt=READ,
    tags=["Invites"],
    summary="One invite",
    operation_class=describes(answer=wire.InviteObject),
)
async def retrieve_invite(
    request: AuthenticatedRequest, invite_id: FromPath[str]
) -> Response[bytes]:
    check_id("invite_id", invite_id)
    async with reading(request) as conn:
        found = await invites.get_invite(conn, org_id=request.user.org_id, invite_id=invite_id)
    return answer(request, to_invite(found))


@delete(
    INVITE,
    opt=CHANGE,
    status_code=200,
    tags=["Invites"],
    summary="Withdraw an invite",
    operation_class=describes(answer=DeletedObject),
)
async def delete_invite(request: AuthenticatedRequest, invite_id: FromPath[str]) -> Response[bytes]:
    check_id("invite_id", invite_id)
    async with reading(request) as conn:
        await invites.delete_invite(
            conn, org_id=request.user.org_id, invite_id=invite_id, actor=actor_of(request)
        )
    return answer(request, DeletedObject(id=invite_id, object="organization.invite.deleted"))


routes = [
    list_users,
    retrieve_user,
    update_user,
    delete_user,
    list_invites,
    create_invite,
    retrieve_invite,
    delete_invite,
]
