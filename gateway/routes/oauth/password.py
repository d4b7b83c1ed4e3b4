"""Sets another password: POST /oauth/account/password by somebody who is signed in and shows the
old one, and /passwords/reset, where the link of an administrator leads.

The link's token stands in the form, so the page sends no referrer and keeps no copy.
"""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, get

from gateway.auth.login.login import WrongCredentials
from gateway.auth.login.passwords import MIN_LENGTH, PasswordsBusy, WeakPassword, check_strength
from gateway.auth.login.reset import RESET_PATH, ResetUser, find_reset
from gateway.auth.oauth.authorization import Authorization, renew_password
from gateway.routes.oauth.login import (
    ACCOUNT,
    BUSY,
    PASSWORD_CHANGED,
    PASSWORD_ERRORS,
    account_page,
    explain,
    read_account_form,
)
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
from gateway.tenancy.errors import NotFound

PURPOSE = "password-reset"
WRONG = "That is not your password."


@FormRoute(ACCOUNT + "/password")
async def change(request: Request[Any, Any, Any]) -> Response[bytes]:
    auth = auth_of(request)
    try:
        browser, session, form = await read_account_form(request)
    except BadForm:
        return stale_form()
    user: dict[str, Any] = {"org_id": session.org_id, "user_id": session.user_id}
    password, where = form.get("password", ""), browser.where
    try:
        check_strength(password, session.email, session.name)
        old = await auth.login.by_old_password(
            **user, password=form.get("current_password", ""), origin=where
        )
        done = await renew_password(auth, **user, replacing=old, password=password, origin=where)
    except WeakPassword as weak:
        return await account_page(auth, browser, session, problem=str(weak))
    except PASSWORD_ERRORS as error:
        return await account_page(auth, browser, session, **explain(error, wrong=WRONG))
    return signed_in(redirect(f"{ACCOUNT}?{PASSWORD_CHANGED}"), auth, done)


def closed() -> Response[bytes]:
    return page(
        "error",
        status=404,
        error="invalid_request",
        description="This link was used or has expired. Ask for another one.",
    )


def reset_page(
    auth: Authorization,
    browser: Browser,
    user: ResetUser,
    token: str,
    *,
    problem: str | None = None,
    status: int = 200,
) -> Response[bytes]:
    response = page(
        "reset",
        status=status,
        action=RESET_PATH,
        email=user.email,
        org_name=user.org_name,
        problem=problem,
        token=token,
        min_length=MIN_LENGTH,
        form_token=auth.seals.form_token(browser.cookie, PURPOSE),
    )
    return remembering(response, auth, browser)


async def read_link(auth: Authorization, token: str) -> ResetUser:
    """Raises: NotFound."""
    async with auth.system_db.connect() as conn:
        return await find_reset(conn, token, secret=auth.secret, now=auth.clock())


@get(RESET_PATH, opt=PUBLIC, include_in_schema=False)
async def show(request: Request[Any, Any, Any]) -> Response[bytes]:
    auth, token = auth_of(request), request.query_params.get("token", "")
    try:
        user = await read_link(auth, token)
    except NotFound:
        return closed()
    return reset_page(auth, await open_browser(request), user, token)


@FormRoute(RESET_PATH)
async def reset(request: Request[Any, Any, Any]) -> Response[bytes]:
    auth = auth_of(request)
    try:
        form, browser = await read_sent(request, PURPOSE)
        token, password = form.get("token", ""), form.get("password", "")
        user = await read_link(auth, token)
    except BadForm:
        return stale_form()
    except NotFound:
        return closed()
    try:
        check_strength(password, user.email)
        done = await renew_password(
            auth,
            org_id=user.org_id,
            user_id=user.id,
            replacing=user.password_hash,
            password=password,
            origin=browser.where,
        )
    except WeakPassword as weak:
        return reset_page(auth, browser, user, token, problem=str(weak), status=400)
    except PasswordsBusy:
        return reset_page(auth, browser, user, token, problem=BUSY, status=503)
    except WrongCredentials:
        return closed()
    return signed_in(redirect(f"{ACCOUNT}?{PASSWORD_CHANGED}"), auth, done)


routes = [change, show, reset]
