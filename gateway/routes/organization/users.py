"""/v1/organization/users and /invites: who belongs to an org, and who may come. OpenAI's shapes,
with five roles for a user where OpenAI has two.

Nobody gives or takes a role that has more than they have themselves. An invite's link stands in the
header `X-Tollgate-Invite-Link` of the answer that made it, since OpenAI's invite has no field for
it: nothing here sends e-mail.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, cast

from litestar import Response
from msgspec import UnsetType
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.net.mail import invitation
from gateway.principal import Role
from gateway.routes.shared.access import needs
from gateway.routes.shared.resource import (
    AdminRequest,
    AdminResource,
    check_id,
    require_appoint,
    show_once,
    to_cursor,
)
from gateway.tenancy.member_tables import check_role
from gateway.tenancy.members import invites as invite_verbs
from gateway.tenancy.members import users as verbs
from gateway.tenancy.members.invites import Invite, ProjectGrant
from gateway.tenancy.members.users import Membership, User
from gateway.wire.organization import organization as wire
from gateway.wire.organization.organization import DeletedObject, ListQuery
from gateway.wire.shared.resource import view_of

INVITE_LINK = "x-tollgate-invite-link"
INVITE_MAIL = "x-tollgate-invite-mail"
UserInProjects = tuple[User, list[Membership]]


def to_user(found: UserInProjects) -> wire.OrganizationUser:
    user, member_of = found
    projects = [
        wire.UserProject(id=each.project_id, name=each.name, role=each.role) for each in member_of
    ]
    created = int(user.created_at.timestamp())
    return view_of(
        wire.OrganizationUser,
        user,
        added_at=created,
        created=created,
        user=view_of(wire.UserDetails, user),
        projects=wire.UserProjects(data=projects),
    )


def to_invite(invite: Invite) -> wire.InviteObject:
    projects = [wire.InvitedProject(id=each.id, role=each.role) for each in invite.projects]
    status = invite.status(datetime.now(tz=UTC))
    return view_of(wire.InviteObject, invite, status=status, projects=projects)


users = AdminResource[UserInProjects](
    path="/v1/organization/users",
    id_name="user_id",
    tag="Users",
    change=needs("admin:members"),
    view=wire.OrganizationUser,
    show=to_user,
)
invites = AdminResource[Invite](
    path="/v1/organization/invites",
    id_name="invite_id",
    tag="Invites",
    change=needs("admin:members"),
    view=wire.InviteObject,
    show=to_invite,
)


async def _with_projects(conn: AsyncConnection, found: list[User]) -> list[UserInProjects]:
    if not found:
        return []
    ids = [user.id for user in found]
    by_user = await verbs.memberships(conn, org_id=found[0].org_id, user_ids=ids)
    return [(user, by_user.get(user.id, [])) for user in found]


async def _get_user(conn: AsyncConnection, *, org_id: str, user_id: str) -> UserInProjects:
    found = await verbs.get_user(conn, org_id=org_id, user_id=user_id)
    return (await _with_projects(conn, [found]))[0]


async def _lock_user(request: AdminRequest, conn: AsyncConnection) -> User:
    """Lock a user that is still what the caller has seen."""
    found = await verbs.lock_user(conn, **request.where)
    request.check((await _with_projects(conn, [found]))[0])
    return found


@users.page("List the users", wire.UsersQuery)
async def list_users(
    request: AdminRequest, query: wire.UsersQuery
) -> tuple[list[UserInProjects], bool]:
    async with request.transaction() as conn:
        found, more = await verbs.list_users(
            conn, org_id=request.org_id, emails=query.emails, cursor=to_cursor(query)
        )
        return await _with_projects(conn, found), more


retrieve_user = users.retrieve("One user", _get_user, name="retrieve_user")


@users.update(
    "Change a user's role; their credentials have its power, and no more, within a second",
    wire.UserUpdate,
    method="POST",
)
async def update_user(request: AdminRequest, values: dict[str, Any]) -> UserInProjects:
    role = values["role"]
    async with request.announced(request.id) as conn:
        found = await _lock_user(request, conn)
        if role is not None and role != found.role:
            require_appoint(request.user, found.role, cast(Role, check_role(role)))
            found = await verbs.change_role(conn, **request.where, role=role, actor=request.actor)
        return (await _with_projects(conn, [found]))[0]


@users.delete("Remove a user from the org", answer=DeletedObject)
async def delete_user(request: AdminRequest) -> DeletedObject:
    async with request.announced(request.id) as conn:
        require_appoint(request.user, (await _lock_user(request, conn)).role)
        await verbs.archive_user(conn, **request.where, actor=request.actor)
    return DeletedObject(id=request.id, object="organization.user.deleted")


# ---- invites


@invites.page("List the invites", ListQuery)
async def list_invites(request: AdminRequest, query: ListQuery) -> tuple[list[Invite], bool]:
    async with request.transaction() as conn:
        return await invite_verbs.list_invites(conn, org_id=request.org_id, cursor=to_cursor(query))


@invites.create(
    "Invite somebody; the header X-Tollgate-Invite-Link of the answer is their link, and"
    " X-Tollgate-Invite-Mail says whether it was sent to them",
    wire.InviteCreate,
    status=200,
)
async def create_invite(request: AdminRequest, wanted: wire.InviteCreate) -> Response[bytes]:
    require_appoint(request.user, wanted.role)
    async with request.transaction() as conn:
        if isinstance(wanted.projects, UnsetType):
            grants = await invite_verbs.default_projects(conn, org_id=request.org_id)
        else:
            grants = [
                ProjectGrant(id=check_id("projects", each.id), role=each.role)
                for each in wanted.projects
            ]
        made = await invite_verbs.create_invite(
            conn,
            org_id=request.org_id,
            email=wanted.email,
            role=wanted.role,
            projects=grants,
            secret=request.services.authorization.secret,
            actor=request.actor,
        )
    response = show_once(request, to_invite(made.invite))
    url = request.http.app.state.public_url
    link = invite_verbs.to_link(url, made.token)
    response.headers[INVITE_LINK] = link
    message = invitation(wanted.email, link, wanted.role)
    response.headers[INVITE_MAIL] = await request.services.mailer.send(message)
    return response


retrieve_invite = invites.retrieve("One invite", invite_verbs.get_invite, name="retrieve_invite")


@invites.delete("Withdraw an invite", answer=DeletedObject, conditional=False)
async def delete_invite(request: AdminRequest) -> DeletedObject:
    async with request.transaction() as conn:
        await invite_verbs.delete_invite(conn, **request.where, actor=request.actor)
    return DeletedObject(id=request.id, object="organization.invite.deleted")


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
