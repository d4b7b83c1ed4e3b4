"""Reads a person's browser for the pages of the authorization server: its cookies, its session, its
forms.

Forms are bounded and read strictly; each carries a token that is bound to the browser and to that
form, and none from another site is taken.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from litestar import Request, Response, post
from litestar.datastructures import Cookie

from gateway.auth.login.login import LoginOrigin, SignedIn
from gateway.auth.login.sessions import (
    DEVICE_LIFETIME_S,
    MAX_COOKIE_LENGTH,
    SESSION_LIFETIME_S,
    Session,
    find_session,
)
from gateway.auth.oauth.authorization import Authorization
from gateway.console.pages import guarded, render
from gateway.routes.shared.access import PUBLIC, address_of, services
from gateway.routes.shared.media_types import FORM, HTML
from gateway.routes.shared.request_state import REQUEST_ID
from gateway.secret import random_secret

MAX_FORM_BYTES = 32 * 1024
MAX_FIELDS = 16
SESSION, DEVICE = "tollgate_session", "tollgate_device"
HOST_PREFIX = "__Host-"
"""RFC 6265bis, 4.1.3.2: only this host over TLS can have set it."""


FormRoute = partial(
    post,
    opt=PUBLIC,
    include_in_schema=False,
    status_code=303,
    request_max_body_size=MAX_FORM_BYTES,
)
"""Declares the route that a form on one of our pages posts to; it redirects by default (303)."""


class BadForm(Exception):
    """An error: not a form of ours, or not sent from it; nothing was done."""


class Browser(msgspec.Struct, frozen=True, kw_only=True):
    cookie: str
    """The value that this browser's form tokens are bound to."""
    fresh: bool
    """It has not been given its cookie yet."""
    session: Session | None
    where: LoginOrigin


def auth_of(request: Request[Any, Any, Any]) -> Authorization:
    return services(request).authorization


async def open_browser(request: Request[Any, Any, Any]) -> Browser:
    auth = auth_of(request)
    cookie = request.cookies.get(_name(auth, SESSION), "")
    session = None
    known = 0 < len(cookie) <= MAX_COOKIE_LENGTH and cookie.isascii()
    if known:
        async with auth.system_db.connect() as conn:
            session = await find_session(conn, auth.sessions, cookie, now=auth.clock())
    where = where_of(request, auth)
    return Browser(
        cookie=cookie if known else random_secret(), fresh=not known, session=session, where=where
    )


def where_of(request: Request[Any, Any, Any], auth: Authorization) -> LoginOrigin:
    address = address_of(request)
    return LoginOrigin(
        address=None if address is None else str(address),
        device_cookie=request.cookies.get(_name(auth, DEVICE)),
        request_id=request.scope.get("state", {}).get(REQUEST_ID),
    )


def remembering(
    response: Response[bytes], auth: Authorization, browser: Browser
) -> Response[bytes]:
    """Give the browser the cookie that the forms on this page are bound to."""
    if browser.fresh:
        response.set_cookie(_cookie(auth, SESSION, browser.cookie, None))
    return response


def signed_in(response: Response[bytes], auth: Authorization, done: SignedIn) -> Response[bytes]:
    response.set_cookie(_cookie(auth, SESSION, done.session, SESSION_LIFETIME_S))
    response.set_cookie(_cookie(auth, DEVICE, done.device, DEVICE_LIFETIME_S))
    return response


def signed_out(response: Response[bytes], auth: Authorization) -> Response[bytes]:
    response.set_cookie(_cookie(auth, SESSION, "", 0))
    return response


def _name(auth: Authorization, name: str) -> str:
    return HOST_PREFIX + name if auth.secure else name


def _cookie(auth: Authorization, name: str, value: str, max_age: int | None) -> Cookie:
    return Cookie(
        key=_name(auth, name),
        value=value,
        path="/",
        max_age=max_age,
        httponly=True,
        secure=auth.secure,
        samesite="lax",
    )


async def read_sent(
    request: Request[Any, Any, Any], purpose: str
) -> tuple[dict[str, str], Browser]:
    """Read a form that was on a page of ours in this browser. Raises: BadForm."""
    form = await read_form(request)
    browser = await open_browser(request)
    check_token(auth_of(request), browser, form.get("form_token", ""), purpose)
    return form, browser


async def read_form(
    request: Request[Any, Any, Any], max_fields: int = MAX_FIELDS
) -> dict[str, str]:
    """Read each field once. Raises: BadForm."""
    refuse_other_sites(request)
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM:
        raise BadForm
    try:
        text = (await request.body()).decode("ascii")
        pairs = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=max_fields)
    except ValueError:
        raise BadForm from None
    fields = dict(pairs)
    if len(fields) < len(pairs) or any("\0" in value for value in fields.values()):
        raise BadForm
    return fields


def refuse_other_sites(request: Request[Any, Any, Any]) -> None:
    """Raises: BadForm."""
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise BadForm


def check_token(auth: Authorization, browser: Browser, token: str, purpose: str) -> None:
    """Raises: BadForm."""
    if browser.fresh or not auth.seals.is_form_token(token, browser.cookie, purpose):
        raise BadForm


def stale_form() -> Response[bytes]:
    """Show the page for a BadForm."""
    return page(
        "error",
        status=403,
        error="invalid_request",
        description="This form is too old, or did not come from this site. Go back and try again.",
    )


def page(
    template: str,
    *,
    status: int = 200,
    destinations: tuple[str, ...] = (),
    headers: dict[str, str] | None = None,
    **values: Any,
) -> Response[bytes]:
    """Show a page. `destinations`: origins to which its form's answer may lead."""
    return Response(
        render(template, **values),
        status_code=status,
        media_type=HTML,
        headers={**guarded(*destinations), **(headers or {})},
    )


def redirect(location: str) -> Response[bytes]:
    """Answer 303: the answer to a form is fetched, never posted on (RFC 9700, 4.12)."""
    return Response(b"", status_code=303, headers={**guarded(), "location": location})
