"""/v1/admin/users and /v1/admin/invites: the users of an org with all five roles that there are,
where OpenAI's invites know two. Our own routes; what OpenAI has a call for is in
`organization.users`.

Nobody gives or takes a role that has more than they have themselves.
"""

from __future__ import annotations

from typing import Any

from litestar import Response

from foundation.structs import given
from gateway.auth.login.reset import make_reset, to_link
from gateway.net.mail import invitation, password_link
from gateway.routes.oauth.protected_resources import public_url
from gateway.routes.shared.access import needs
from gateway.routes.shared.resource import (
    AdminRequest,
    AdminResource,
    check_id,
    expect_nothing,
    require_appoint,
    show_once,
)
from gateway.tenancy.members import invites as invite_verbs
from gateway.tenancy.members import users as verbs
from gateway.tenancy.members.invites import ProjectGrant
from gateway.tenancy.members.mail_topics import choose_mail, topics_of
from gateway.tenancy.members.users import User
from gateway.wire.admin.tenant import (
    CreatedInviteView,
    InviteProject,
    NewInvite,
    PasswordReset,
    UserPatch,
    UserView,
)
from gateway.wire.shared.resource import view_of


def show_user(user: User) -> UserView:
    topics = topics_of(user.role, user.mail_choices, is_operator=True)
    return view_of(UserView, user, mail={str(topic): sent for topic, sent in topics.items()})


users = AdminResource[User](
    path="/v1/admin/users",
    id_name="user_id",
    tag="Users",
    change=needs("admin:members"),
    view=UserView,
    show=show_user,
)
invites = AdminResource[CreatedInviteView](
    path="/v1/admin/invites", tag="Invites", change=needs("admin:members"), view=CreatedInviteView
)

retrieve = users.retrieve("One user and their role", verbs.get_user)


@users.update(
    "Give a user another role, within a second, or choose what e-mail they are sent", UserPatch
)
async def update(request: AdminRequest, values: dict[str, Any]) -> User:
    async with request.announced(request.id) as conn:
        found = await verbs.lock_user(conn, **request.where)
        request.check(found)
        if "role" in values and values["role"] != found.role:
            require_appoint(request.user, found.role, values["role"])
            role = values["role"]
            found = await verbs.change_role(conn, **request.where, role=role, actor=request.actor)
        if "mail" in values:
            require_appoint(request.user, found.role)
            chosen = given(values["mail"])
            found = await choose_mail(conn, **request.where, choices=chosen, actor=request.actor)
    return found


@users.act(
    "/password-reset",
    "Make a link with which a user sets another password; the answer holds it, this once",
    answer=PasswordReset,
    status=201,
)
async def reset_password(request: AdminRequest) -> Response[bytes]:
    await expect_nothing(request)
    authorization = request.services.authorization
    async with request.transaction() as conn:
        user = await verbs.lock_user(conn, **request.where)
        request.check(user)
        # Whoever has the link can become them: nobody gets so to more than they have.
        require_appoint(request.user, user.role)
        made = await make_reset(
            conn,
            **request.where,
            secret=authorization.secret,
            actor=request.actor,
            now=authorization.clock(),
        )
    url = to_link(public_url(request.http), made.token)
    mail = await request.services.mailer.send(password_link(user.email, url))
    shown = view_of(PasswordReset, made, user_id=request.id, url=url, mail=mail)
    return show_once(request, shown, status=201)


@invites.create("Invite somebody with any role; the answer holds their link, this once", NewInvite)
async def invite(request: AdminRequest, wanted: NewInvite) -> Response[bytes]:
    require_appoint(request.user, wanted.role)
    async with request.transaction() as conn:
        made = await invite_verbs.create_invite(
            conn,
            org_id=request.org_id,
            email=wanted.email,
            role=wanted.role,
            projects=[
                ProjectGrant(id=check_id("projects", each.id), role=each.role)
                for each in wanted.projects
            ],
            secret=request.services.authorization.secret,
            actor=request.actor,
        )
    projects = [InviteProject(id=each.id, role=each.role) for each in made.invite.projects]
    url = invite_verbs.to_link(public_url(request.http), made.token)
    mail = await request.services.mailer.send(invitation(wanted.email, url, wanted.role))
    shown = view_of(CreatedInviteView, made.invite, projects=projects, url=url, mail=mail)
    return show_once(request, shown, status=201)


routes = [retrieve, update, reset_password, invite]
