"""/oauth/link: where a link leads that `tollgate up` or `tollgate users link` prints. It signs its
user in, once, or makes the first owner of the operator's organization.

A look at the page uses nothing up: programs that read links before people do would.
"""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, get
from redis.exceptions import RedisError

from gateway.auth.login.login import PASSWORD, SignedIn
from gateway.auth.login.passwords import MIN_LENGTH, PasswordsBusy, WeakPassword, check_strength
from gateway.auth.login.sign_in_links import PATH, LinkedUser, find_link, use_link
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
from gateway.tenancy.members.users import create_user

PURPOSE = "sign-in-link"
BY_LINK = ("otp",)
"""How somebody proved who they are: by something good once (RFC 8176)."""


def closed() -> Response[bytes]:
    return page(
        "error",
        status=404,
        error="invalid_request",
        description="This link was used or has expired. Make another with `tollgate users link`.",
    )


def link_page(
    auth: Authorization,
    browser: Browser,
    linked: LinkedUser,
    token: str,
    *,
    problem: str | None = None,
    form: dict[str, str] | None = None,
    status: int = 200,
) -> Response[bytes]:
    typed = form or {}
    response = page(
        "link",
        status=status,
        action=PATH,
        email=linked.email,
        role=linked.role,
        org_name=linked.org_name,
        problem=problem,
        token=token,
        name=typed.get("name", ""),
        address=typed.get("email", ""),
        min_length=MIN_LENGTH,
        form_token=auth.seals.form_token(browser.cookie, PURPOSE),
    )
    return remembering(response, auth, browser)


async def read_link(auth: Authorization, token: str) -> LinkedUser:
    """Raises: NotFound, RedisError."""
    async with auth.system_db.connect() as conn:
        return await find_link(conn, auth.redis, token, secret=auth.secret)


@get(PATH, opt=PUBLIC, include_in_schema=False)
async def show(request: Request[Any, Any, Any]) -> Response[bytes]:
    auth, token = auth_of(request), request.query_params.get("token", "")
    try:
        linked = await read_link(auth, token)
    except (NotFound, RedisError):
        return closed()
    return link_page(auth, await open_browser(request), linked, token)


@FormRoute(PATH)
async def use(request: Request[Any, Any, Any]) -> Response[bytes]:
    auth = auth_of(request)
    try:
        form, browser = await read_sent(request, PURPOSE)
        token = form.get("token", "")
        linked = await read_link(auth, token)
    except BadForm:
        return stale_form()
    except (NotFound, RedisError):
        return closed()
    try:
        if linked.user_id is None:
            done = await become_owner(auth, browser, linked, token, form)
        else:
            async with tenant(auth.db, linked.org_id) as conn:
                await use_link(conn, auth.redis, token, secret=auth.secret)
                origin = browser.where
                done = await auth.login.start(conn, linked.org_id, linked.user_id, BY_LINK, origin)
    except (WeakPassword, InvalidField, NameTaken) as error:
        problem = str(error) if isinstance(error, WeakPassword) else f"{error}."
        return link_page(auth, browser, linked, token, problem=problem, form=form, status=400)
    except PasswordsBusy:
        return link_page(auth, browser, linked, token, problem=BUSY, form=form, status=503)
    except (NotFound, RedisError):
        return closed()
    return signed_in(redirect(CONSOLE), auth, done)


async def become_owner(
    auth: Authorization,
    browser: Browser,
    linked: LinkedUser,
    token: str,
    form: dict[str, str],
) -> SignedIn:
    """Make the first owner, and use the link up with the same transaction.

    Raises: WeakPassword, PasswordsBusy, InvalidField, NameTaken, NotFound, RedisError.
    """
    email, password = form.get("email", "").strip(), form.get("password", "")
    name = form.get("name", "").strip()
    check_strength(password, email, name)
    hashed = await auth.passwords.hash(password)
    async with tenant(auth.db, linked.org_id) as conn:
        made = await create_user(
            conn,
            org_id=linked.org_id,
            email=email,
            name=name,
            role=linked.role,
            actor=browser.where.actor(linked.org_id),
            password_hash=hashed,
        )
        done = await auth.login.start(conn, linked.org_id, made.id, PASSWORD, browser.where)
        await redeem(auth, token)
    return done


async def redeem(auth: Authorization, token: str) -> None:
    """Use up the link of an owner who is being made: of two who come at once, one is told that it
    was used. Raises: NotFound, RedisError."""
    async with auth.system_db.connect() as conn:
        await use_link(conn, auth.redis, token, secret=auth.secret)


routes = [show, use]
