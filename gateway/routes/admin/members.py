"""/v1/admin/users and /v1/admin/invites: the users of an org with all five roles that there are,
where OpenAI's invites know two. Our own routes; what OpenAI has a call for is in
`organization.users`.

Nobody gives or takes a role that has more than they have themselves.
"""

from __future__ import annotations

import msgspec
from litestar import Response, get, patch, post
from litestar.params import FromPath
from msgspec import UnsetType

from gateway.auth.login.reset import make_reset, to_link
from gateway.db import tenant
from gateway.permissions import SCOPE_ADMIN_READ
from gateway.routes.oauth.protected_resources import public_url
from gateway.routes.shared.access import AuthenticatedRequest, actor_of, needs, services
from gateway.routes.shared.body import plain_body
from gateway.routes.shared.common_requests import (
    changing_for,
    check_id,
    expect_nothing,
    require_appoint,
)
from gateway.routes.shared.conditional import answer, if_match
from gateway.routes.shared.operations import describes
from gateway.tenancy.members import invites, users
from gateway.tenancy.members.invites import ProjectGrant
from gateway.tenancy.members.users import User
from gateway.wire.admin.tenant import (
    CreatedInviteView,
    InviteProject,
    NewInvite,
    PasswordReset,
    UserPatch,
    UserView,
)
from gateway.wire.shared.refusals import decode_kept

USER = "/v1/admin/users/{user_id:str}"
INVITES = "/v1/admin/invites"
CHANGE = needs("admin:members")
NO_STORE = {"cache-control": "no-store"}
_patch_decoder = msgspec.json.Decoder(UserPatch)
_invite_decoder = msgspec.json.Decoder(NewInvite)


def to_view(user: User) -> UserView:
    return UserView(
        id=user.id,
        email=user.email,
        name=user.name,
        role=user.role,
        created_at=int(user.created_at.timestamp()),
    )


@get(
    USER,
    opt=needs(SCOPE_ADMIN_READ),
    tags=["Users"],
    summary="One user and their role",
    operation_class=describes(answer=UserView),
)
async def retrieve(request: AuthenticatedRequest, user_id: FromPath[str]) -> Response[bytes]:
    check_id("user_id", user_id)
    org_id = request.user.org_id
    async with tenant(services(request).db, org_id) as conn:
        found = await users.get_user(conn, org_id=org_id, user_id=user_id)
    return answer(request, to_view(found))


@patch(
    USER,
    opt=CHANGE,
    tags=["Users"],
    summary="Give a user another role; their credentials have its power within a second",
    operation_class=describes(body=UserPatch, answer=UserView, conditional=True),
)
async def update(request: AuthenticatedRequest, user_id: FromPath[str]) -> Response[bytes]:
    check_id("user_id", user_id)
    wanted, precondition = decode_kept(_patch_decoder, await plain_body(request)), if_match(request)
    org_id = request.user.org_id
    async with changing_for(request, user_id) as conn:
        found = await users.lock_user(conn, org_id=org_id, user_id=user_id)
        precondition.check(to_view(found))
        if not isinstance(wanted.role, UnsetType) and wanted.role != found.role:
            require_appoint(request.user, found.role, wanted.role)
            found = await users.change_role(
                conn, org_id=org_id, user_id=user_id, role=wanted.role, actor=actor_of(request)
            )
    return answer(request, to_view(found))


@post(
    USER + "/password-reset",
    opt=CHANGE,
    status_code=201,
    tags=["Users"],
    summary="Make a link with which a user sets another password; the answer holds it, this once",
    operation_class=describes(answer=PasswordReset, status=201, idempotent=True, conditional=True),
)
async def reset_password(request: AuthenticatedRequest, user_id: FromPath[str]) -> Response[bytes]:
    check_id("user_id", user_id)
    await expect_nothing(request)
    precondition, found, org_id = if_match(request), services(request), request.user.org_id
    async with tenant(found.db, org_id) as conn:
        user = await users.lock_user(conn, org_id=org_id, user_id=user_id)
        precondition.check(to_view(user))
        # Whoever has the link can become them: nobody gets so to more than they have.
        require_appoint(request.user, user.role)
        made = await make_reset(
            conn,
            org_id=org_id,
            user_id=user_id,
            secret=found.authorization.secret,
            actor=actor_of(request),
            now=found.authorization.clock(),
        )
    shown = PasswordReset(
        user_id=user_id,
        expires_at=int(made.expires_at.timestamp()),
        url=to_link(public_url(request), made.token),
    )
    return answer(request, shown, status=201, headers=NO_STORE)


@post(
    INVITES,
    opt=CHANGE,
    tags=["Invites"],
    summary="Invite somebody with any role; the answer holds their link, this once",
    operation_class=describes(
        body=NewInvite, answer=CreatedInviteView, status=201, idempotent=True
    ),
)
async def invite(request: AuthenticatedRequest) -> Response[bytes]:
    wanted = decode_kept(_invite_decoder, await plain_body(request))
    require_appoint(request.user, wanted.role)
    for each in wanted.projects:
        check_id("projects", each.id)
    found, org_id = services(request), request.user.org_id
    async with tenant(found.db, org_id) as conn:
        made = await invites.create_invite(
            conn,
            org_id=org_id,
            email=wanted.email,
            role=wanted.role,
            projects=[ProjectGrant(id=each.id, role=each.role) for each in wanted.projects],
            secret=found.authorization.secret,
            actor=actor_of(request),
        )
    shown = CreatedInviteView(
        id=made.invite.id,
        email=made.invite.email,
        role=made.invite.role,
        projects=[InviteProject(id=each.id, role=each.role) for each in made.invite.projects],
        created_at=int(made.invite.created_at.timestamp()),
        expires_at=int(made.invite.expires_at.timestamp()),
        url=invites.to_link(public_url(request), made.token),
    )
    return answer(request, shown, status=201, headers=NO_STORE)


routes = [retrieve, update, reset_password, invite]
