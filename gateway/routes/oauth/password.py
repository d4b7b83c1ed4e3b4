"""Sets another password: POST /oauth/account/password by somebody who is signed in and shows the
old one, and /passwords/reset, where the link of an administrator leads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from litestar import Request, Response

from gateway.auth.login.login import SignedIn, WrongCredentials
from gateway.auth.login.passwords import WeakPassword, check_strength
from gateway.auth.login.reset import RESET_PATH, ResetUser, find_reset
from gateway.auth.oauth.authorization import Authorization, renew_password
from gateway.routes.oauth.linked_page import LinkedPage, SentForm
from gateway.routes.oauth.login import (
    ACCOUNT,
    PASSWORD_CHANGED,
    PASSWORD_ERRORS,
    account_page,
    explain,
    read_account_form,
)
from gateway.routes.shared.browser import (
    BadForm,
    FormRoute,
    auth_of,
    redirect,
    signed_in,
    stale_form,
)
from gateway.tenancy.errors import NotFound

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


class ResetPage(LinkedPage[ResetUser]):
    path, template, leads_to = RESET_PATH, "reset", f"{ACCOUNT}?{PASSWORD_CHANGED}"
    closed = "This link was used or has expired. Ask for another one."

    async def find(self, auth: Authorization, token: str) -> ResetUser:
        async with auth.system_db.connect() as conn:
            return await find_reset(conn, token, secret=auth.secret, now=auth.clock())

    def shown(self, found: ResetUser, typed: Mapping[str, str]) -> dict[str, Any]:
        return {"email": found.email, "org_name": found.org_name}

    async def use(self, found: ResetUser, sent: SentForm) -> SignedIn:
        password = sent.fields.get("password", "")
        check_strength(password, found.email)
        try:
            return await renew_password(
                sent.auth,
                org_id=found.org_id,
                user_id=found.id,
                replacing=found.password_hash,
                password=password,
                origin=sent.where,
            )
        except WrongCredentials:
            raise NotFound("token", "the password was changed meanwhile") from None


routes = [change, *ResetPage().routes()]
