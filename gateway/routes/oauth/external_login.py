"""/oauth/external/{issuer}/start and /callback: signing in through an external OpenID provider.

The browser's own cookie is what binds the two, so it has one before it leaves. Where it goes on
from here is our own endpoint, with the query of a request that is read there anew.
"""

from __future__ import annotations

import logging
from typing import Any
from urllib.parse import parse_qsl

from litestar import Request, Response, get
from litestar.params import FromPath
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.auth.federation.external_login import LoginRefused, OtherOrganization
from gateway.auth.login.login import SignedIn
from gateway.routes.oauth.login import FINDS_ORG, ask_org, choose_org, onward
from gateway.routes.shared.access import PUBLIC
from gateway.routes.shared.browser import (
    auth_of,
    open_browser,
    page,
    redirect,
    remembering,
    signed_in,
)

log = logging.getLogger(__name__)

START = "/oauth/external/{issuer_id:str}/start"
CALLBACK = "/oauth/external/{issuer_id:str}/callback"
FEDERATED = ("fed",)
"""How somebody proved who they are: elsewhere."""
MAX_FIELDS = 16


def query_of(request: Request[Any, Any, Any]) -> str:
    raw: bytes = request.scope["query_string"]
    return raw.decode("latin-1")


def refused(error: LoginRefused) -> Response[bytes]:
    log.info("a login through an issuer was refused: %s", error)
    return page(
        "error",
        status=403,
        error="access_denied",
        description="Signing in through this provider did not work. Go back and try again.",
    )


@get(START, opt=PUBLIC, include_in_schema=False)
async def start(request: Request[Any, Any, Any], issuer_id: FromPath[str]) -> Response[bytes]:
    auth, browser = auth_of(request), await open_browser(request)
    query = query_of(request)
    finds_org = query.partition("&")[0] == FINDS_ORG
    try:
        url = await auth.external.start(
            issuer_id,
            request=query.removeprefix(FINDS_ORG).removeprefix("&") if finds_org else query,
            browser=browser.cookie,
            finds_org=finds_org,
        )
    except LoginRefused as error:
        return refused(error)
    return remembering(redirect(url), auth, browser)


@get(CALLBACK, opt=PUBLIC, include_in_schema=False)
async def callback(request: Request[Any, Any, Any], issuer_id: FromPath[str]) -> Response[bytes]:
    auth, browser = auth_of(request), await open_browser(request)

    async def sign_in(conn: AsyncConnection, org_id: str, user_id: str) -> SignedIn:
        return await auth.login.start(conn, org_id, user_id, FEDERATED, browser.where)

    try:
        query = parse_qsl(
            query_of(request), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS
        )
        done = await auth.external.finish(
            issuer_id,
            callback=query,
            browser=browser.cookie,
            sign_in=sign_in,
            actor=browser.where.actor,
            system_db=auth.system_db,
        )
    except OtherOrganization as elsewhere:
        if not elsewhere.listed:
            return await ask_org(auth, browser, elsewhere.request)
        if len(elsewhere.listed) == 1:
            own = elsewhere.listed[0].issuer
            return redirect(f"/oauth/external/{own.id}/start?{elsewhere.request}")
        return choose_org(auth, browser, elsewhere.listed, elsewhere.request)
    except LoginRefused as error:
        return refused(error)
    except ValueError as error:
        return refused(LoginRefused(f"no query: {error}"))
    return signed_in(redirect(onward(done.request)), auth, done.signed_in)


routes = [start, callback]
