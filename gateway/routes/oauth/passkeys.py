"""Registers and uses passkeys by JSON, for the one script of the pages: /oauth/passkeys/...

A request carries the token of the form on whose page the script runs; JSON from another site would
need a preflight that nobody answers here.
"""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, Response
from redis.exceptions import RedisError

from gateway.auth.login.login import WrongCredentials
from gateway.auth.login.passkeys import InvalidPasskey
from gateway.auth.oauth.rfc6749_authorize import AuthorizationRefused
from gateway.console.pages import guarded
from gateway.routes.oauth.login import (
    ACCOUNT,
    ACCOUNT_PURPOSE,
    LOGIN_PURPOSE,
    read_account_form,
    read_occasion,
)
from gateway.routes.shared.browser import (
    BadForm,
    Browser,
    FormRoute,
    auth_of,
    check_token,
    open_browser,
    redirect,
    refuse_other_sites,
    signed_in,
    stale_form,
)
from gateway.routes.shared.media_types import JSON
from gateway.tenancy.errors import InvalidField, NotFound


class PasskeyForm(msgspec.Struct, frozen=True, kw_only=True):
    form_token: str
    request: str = ""
    name: str = ""
    credential: dict[str, Any] | None = None


def reply(body: bytes, status: int = 200) -> Response[bytes]:
    return Response(body, status_code=status, media_type=JSON, headers=guarded())


def refusal(error: str, status: int) -> Response[bytes]:
    return reply(msgspec.json.encode({"error": error}), status)


def to(location: str) -> Response[bytes]:
    return reply(msgspec.json.encode({"location": location}))


async def read(request: Request[Any, Any, Any], purpose: str) -> tuple[Browser, PasskeyForm]:
    """Raises: BadForm."""
    refuse_other_sites(request)
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise BadForm
    try:
        sent = msgspec.json.decode(await request.body(), type=PasskeyForm)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadForm from None
    browser = await open_browser(request)
    check_token(auth_of(request), browser, sent.form_token, purpose)
    return browser, sent


@FormRoute("/oauth/passkeys/sign-in/options", status_code=200)
async def sign_in_options(request: Request[Any, Any, Any]) -> Response[bytes]:
    try:
        browser, _ = await read(request, LOGIN_PURPOSE)
    except BadForm:
        return refusal("invalid_request", 403)
    return reply(auth_of(request).passkeys.sign_in_options(browser.cookie).encode())


@FormRoute("/oauth/passkeys/sign-in", status_code=200)
async def sign_in(request: Request[Any, Any, Any]) -> Response[bytes]:
    auth = auth_of(request)
    try:
        browser, sent = await read(request, LOGIN_PURPOSE)
        occasion = await read_occasion(auth, sent.request)
        done = await auth.passkeys.sign_in(
            browser.cookie, sent.credential, org_id=occasion.org_id, origin=browser.where
        )
    except (BadForm, AuthorizationRefused):
        return refusal("invalid_request", 403)
    except WrongCredentials:
        return refusal("access_denied", 403)
    except (RedisError, OSError):
        return refusal("temporarily_unavailable", 503)
    return signed_in(to(occasion.location), auth, done)


@FormRoute("/oauth/passkeys/register/options", status_code=200)
async def register_options(request: Request[Any, Any, Any]) -> Response[bytes]:
    try:
        browser, _ = await read(request, ACCOUNT_PURPOSE)
    except BadForm:
        return refusal("invalid_request", 403)
    if browser.session is None:
        return refusal("login_required", 403)
    options = await auth_of(request).passkeys.registration_options(browser.session, browser.cookie)
    return reply(options.encode())


@FormRoute("/oauth/passkeys/register", status_code=200)
async def register(request: Request[Any, Any, Any]) -> Response[bytes]:
    try:
        browser, sent = await read(request, ACCOUNT_PURPOSE)
        session = browser.session
        if session is None:
            return refusal("login_required", 403)
        await auth_of(request).passkeys.register(
            session,
            browser.cookie,
            sent.credential,
            name=sent.name,
            actor=browser.where.actor(session.user_id),
        )
    except BadForm:
        return refusal("invalid_request", 403)
    except (InvalidPasskey, InvalidField):
        return refusal("invalid_request", 400)
    except (RedisError, OSError):
        return refusal("temporarily_unavailable", 503)
    return to(ACCOUNT)


@FormRoute("/oauth/passkeys/remove", status_code=200)
async def remove(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Remove a passkey by a plain form, which works without the script."""
    try:
        browser, session, form = await read_account_form(request)
        actor = browser.where.actor(session.user_id)
        passkey_id = form.get("passkey_id", "")
        await auth_of(request).passkeys.remove(session, passkey_id, actor=actor)
    except (BadForm, NotFound):
        return stale_form()
    return redirect(ACCOUNT)


routes = [sign_in_options, sign_in, register_options, register, remove]
