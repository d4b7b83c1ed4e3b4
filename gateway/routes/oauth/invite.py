"""/invites/accept: where the link of an invite leads. Whoever has it becomes the user it was made
for, with a password of their own, and is signed in.

The token stands in the form, so the page sends no referrer and keeps no copy.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from litestar import Request, Response, get
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.auth.login.login import PASSWORD
from gateway.auth.login.passwords import MIN_LENGTH, PasswordsBusy, WeakPassword, check_strength
from gateway.auth.oauth.authorization import Authorization
from gateway.console.pages import CONSOLE
from gateway.db import tenant
from gateway.routes.oauth.login import BUSY
from gateway.routes.shared.access import PUBLIC
from gateway.routes.shared.browser import (
    BadForm,
    Browser,
    FormRoute,
    auth_of,
    open_browser,
    page,
    read_sent,
    redirect,
    remembering,
    signed_in,
    stale_form,
)
from gateway.tenancy.errors import InvalidField, NameTaken, NotFound
from gateway.tenancy.members.invites import ACCEPT_PATH, Invite, accept_invite, find_invite
from gateway.tenancy.tables import orgs

PURPOSE = "invite"


async def open_invite(conn: AsyncConnection, auth: Authorization, token: str) -> tuple[Invite, str]:
    """Return the invite with its org's name. Raises: NotFound."""
    invite = await find_invite(conn, token, secret=auth.secret, now=auth.clock())
    name: str | None = await conn.scalar(sa.select(orgs.c.name).where(orgs.c.id == invite.org_id))
    assert name is not None, "an open invite is of a live org"
    return invite, name


def closed() -> Response[bytes]:
    return page(
        "error",
        status=404,
        error="invalid_request",
        description="This invitation was used, withdrawn or has expired. Ask for another one.",
    )


def invite_page(
    auth: Authorization,
    browser: Browser,
    found: tuple[Invite, str],
    token: str,
    *,
    problem: str | None = None,
    name: str = "",
    status: int = 200,
) -> Response[bytes]:
    invite, org_name = found
    response = page(
        "invite",
        status=status,
        action=ACCEPT_PATH,
        org_name=org_name,
        role=invite.role,
        email=invite.email,
        problem=problem,
        token=token,
        name=name,
        min_length=MIN_LENGTH,
        form_token=auth.seals.form_token(browser.cookie, PURPOSE),
    )
    return remembering(response, auth, browser)


@get(ACCEPT_PATH, opt=PUBLIC, include_in_schema=False)
async def show(request: Request[Any, Any, Any]) -> Response[bytes]:
    auth, token = auth_of(request), request.query_params.get("token", "")
    try:
        async with auth.system_db.connect() as conn:
            found = await open_invite(conn, auth, token)
    except NotFound:
        return closed()
    return invite_page(auth, await open_browser(request), found, token)


@FormRoute(ACCEPT_PATH)
async def accept(request: Request[Any, Any, Any]) -> Response[bytes]:
    auth = auth_of(request)
    try:
        form, browser = await read_sent(request, PURPOSE)
        token, name = form.get("token", ""), form.get("name", "").strip()
        async with auth.system_db.connect() as conn:
            found = await open_invite(conn, auth, token)
    except BadForm:
        return stale_form()
    except NotFound:
        return closed()
    invite, where, password = found[0], browser.where, form.get("password", "")
    try:
        check_strength(password, invite.email, name)
        hashed = await auth.passwords.hash(password)
        async with tenant(auth.db, invite.org_id) as conn:
            user = await accept_invite(
                conn,
                token,
                secret=auth.secret,
                name=name,
                password_hash=hashed,
                ip=where.address,
                request_id=where.request_id,
                now=auth.clock(),
            )
            done = await auth.login.start(conn, user.org_id, user.id, PASSWORD, where)
    except (WeakPassword, InvalidField) as error:
        problem = str(error) if isinstance(error, WeakPassword) else f"Your name {error.message}."
        return invite_page(auth, browser, found, token, problem=problem, name=name, status=400)
    except PasswordsBusy:
        return invite_page(auth, browser, found, token, problem=BUSY, name=name, status=503)
    except (NotFound, NameTaken):
        return closed()
    return signed_in(redirect(CONSOLE), auth, done)


routes = [show, accept]
