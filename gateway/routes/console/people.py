"""Shows /console/people: who is in the organization, with which role; invites, appoints and removes
them. Nobody gives or takes a role that has more than they have themselves."""

from __future__ import annotations

from typing import Any, cast, get_args

import msgspec
from litestar import Response

from gateway.auth.login.reset import make_reset
from gateway.auth.login.reset import to_link as to_reset_link
from gateway.console.tables import Table, TableColumn
from gateway.net.mail import invitation, password_link
from gateway.permissions import may_appoint
from gateway.principal import Role
from gateway.routes.console.frame.page import ConsolePage
from gateway.routes.console.frame.request import ConsoleRequest
from gateway.routes.oauth.protected_resources import public_url
from gateway.routes.shared.resource import require_appoint
from gateway.tenancy.member_tables import check_role
from gateway.tenancy.members import invites, users
from gateway.tenancy.pages import Cursor
from gateway.tenancy.project_pages import list_people

ROLES: dict[Role, str] = {
    "owner": "owner: everything",
    "admin": "admin: everything but issuers and owners",
    "developer": "developer: uses models and tools",
    "billing": "billing: budgets, credits, invoices",
    "reader": "reader: looks at usage, keys, people and bills, changes nothing",
}
INVITES = Cursor(limit=50, order="desc")

page = ConsolePage(name="people", title="People", below="projects")


class ShownLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link that a page shows this once."""

    title: str
    text: str
    url: str
    mail: str
    """Whether it was sent: as the API says it."""


@page.get()
async def show(request: ConsoleRequest, link: ShownLink | None = None) -> Response[bytes]:
    async with request.transaction() as conn:
        found, more = await list_people(conn, org_id=request.org_id, cursor=request.cursor("asc"))
        invited, _ = await invites.list_invites(conn, org_id=request.org_id, cursor=INVITES)
    table = Table(
        "People",
        found,
        TableColumn("Person", "email", link=address_of, detail=lambda line: line.name),
        TableColumn("Role", "role"),
        TableColumn("Member of", "projects"),
        TableColumn("Since", "created_at", kind="time"),
        TableColumn("Id", "id", kind="id"),
    )
    waiting = [each for each in invited if each.status(request.now) == "pending"]
    return request.render(
        "people",
        table=table,
        more=found[-1].id if more else None,
        invites=Table(
            "Invitations",
            waiting,
            TableColumn("Invited", "email"),
            TableColumn("As", "role"),
            TableColumn("Sent", "created_at", kind="time"),
            TableColumn("Ends", "expires_at", kind="time"),
        ),
        roles=roles_for(request),
        link=link,
    )


def address_of(person: Any) -> str:
    return f"{page.path}/{person.id}"


@page.get("/{user_id:str}")
async def show_one(request: ConsoleRequest, link: ShownLink | None = None) -> Response[bytes]:
    where = who(request)
    async with request.transaction() as conn:
        person = await users.get_user(conn, **where)
        by_user = await users.memberships(conn, org_id=request.org_id, user_ids=[where["user_id"]])
    table = Table(
        f"Projects of {person.email}",
        by_user.get(person.id, []),
        TableColumn("Project", "name", link=lambda each: f"/console/projects/{each.project_id}"),
        TableColumn("Role there", "role"),
    )
    return request.render(
        "person",
        person=person,
        table=table,
        roles=roles_for(request),
        may_touch=may_touch(request, person),
        link=link,
    )


def roles_for(request: ConsoleRequest) -> list[tuple[str, str]]:
    """Return the roles that they may give."""
    return [(role, words) for role, words in ROLES.items() if may_appoint(request.user, role)]


def may_touch(request: ConsoleRequest, person: Any) -> bool:
    is_self = person.id == request.session.user_id
    return not is_self and request.can("admin:members") and may_appoint(request.user, person.role)


@page.post("/invite", needs="admin:members", again=show)
async def invite(request: ConsoleRequest) -> Response[bytes]:
    email, role = request.form.get("email", "").strip(), read_role(request)
    require_appoint(request.user, role)
    async with request.transaction() as conn:
        made = await invites.create_invite(
            conn,
            org_id=request.org_id,
            email=email,
            role=role,
            projects=await invites.default_projects(conn, org_id=request.org_id),
            secret=request.auth.secret,
            actor=request.actor,
        )
    url = invites.to_link(public_url(request.http), made.token)
    mail = await request.services.mailer.send(invitation(email, url, role))
    request.form = {}
    text = "Whoever opens it joins with that address. It is good for a week, and once."
    return await show(
        request, ShownLink(title=f"The link for {email}", text=text, url=url, mail=mail)
    )


def read_role(request: ConsoleRequest) -> Role:
    """Raises: InvalidField."""
    return cast(Role, check_role(request.form.get("role", ""), get_args(Role)))


@page.post("/invites/{invite_id:str}/withdraw", needs="admin:members", again=show)
async def withdraw(request: ConsoleRequest) -> Response[bytes]:
    where = {"org_id": request.org_id, "invite_id": request.ids["invite_id"]}
    async with request.transaction() as conn:
        await invites.delete_invite(conn, **where, actor=request.actor)
    return request.done("The invitation is withdrawn: its link leads nowhere.")


@page.post("/{user_id:str}/role", needs="admin:members", again=show_one)
async def change_role(request: ConsoleRequest) -> Response[bytes]:
    where, role = who(request), read_role(request)
    async with request.announced(where["user_id"]) as conn:
        found = await users.lock_user(conn, **where)
        require_appoint(request.user, found.role, role)
        changed = await users.change_role(conn, **where, role=role, actor=request.actor)
    return request.done(f"{changed.email} is {changed.role}.", to=address_of(changed))


@page.post("/{user_id:str}/password", needs="admin:members", again=show_one)
async def reset_password(request: ConsoleRequest) -> Response[bytes]:
    where = who(request)
    async with request.transaction() as conn:
        found = await users.lock_user(conn, **where)
        # Whoever has the link can become them: nobody gets so to more than they have.
        require_appoint(request.user, found.role)
        made = await make_reset(
            conn,
            **where,
            secret=request.auth.secret,
            actor=request.actor,
            now=request.auth.clock(),
        )
    url = to_reset_link(public_url(request.http), made.token)
    mail = await request.services.mailer.send(password_link(found.email, url))
    text = "Whoever opens it sets their password. It is good for an hour, and once."
    link = ShownLink(title=f"A link for {found.email}", text=text, url=url, mail=mail)
    return await show_one(request, link)


@page.post("/{user_id:str}/remove", needs="admin:members", again=show_one)
async def remove(request: ConsoleRequest) -> Response[bytes]:
    where = who(request)
    async with request.announced(where["user_id"]) as conn:
        found = await users.lock_user(conn, **where)
        require_appoint(request.user, found.role)
        await users.archive_user(conn, **where, actor=request.actor)
    return request.done(f"{found.email} is removed, and every key of theirs revoked.")


def who(request: ConsoleRequest) -> dict[str, str]:
    return {"org_id": request.org_id, "user_id": request.ids["user_id"]}


routes = page.routes
