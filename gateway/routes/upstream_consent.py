"""/oauth/upstream/{server}/start and /oauth/upstream/callback: a person lets us in at a server of
the MCP bridge, with the browser that they are signed in with here.

Above: `app`. Below: `vault.oauth`, `browser`. What comes back is taken from the browser, the person
and the org that began it alone, and within ten minutes.
"""

from __future__ import annotations

import logging
from typing import Any
from urllib.parse import parse_qsl

from litestar import Request, Response, get
from litestar.params import FromPath

from gateway.console.pages import page, redirect
from gateway.mcp_door import vault_of
from gateway.routes.access import PUBLIC, services
from gateway.routes.browser import open_browser
from gateway.tenancy.errors import InvalidField, NotFound
from gateway.vault.errors import SignInRefused, VaultError

log = logging.getLogger(__name__)

START = "/oauth/upstream/{server:str}/start"
CALLBACK = "/oauth/upstream/callback"
ACCOUNT = "/oauth/account"
MAX_FIELDS = 16


def refused(error: Exception, status: int = 403) -> Response[bytes]:
    log.info("a consent at an upstream was refused: %s", error)
    return page(
        "error",
        status=status,
        error="access_denied",
        description="Signing in at this server did not work. Sign in here first, and begin again.",
    )


@get(START, opt=PUBLIC, include_in_schema=False)
async def start(request: Request[Any, Any, Any], server: FromPath[str]) -> Response[bytes]:
    browser = await open_browser(request)
    if browser.session is None:
        return refused(SignInRefused(server, "nobody is signed in"), 401)
    person = browser.session
    try:
        vault = vault_of(services(request).mcp)
        url = vault.consents.start(
            vault.client(server),
            org_id=person.org_id,
            upstream=server,
            user_id=person.user_id,
            began=person.user_id,
            browser=browser.cookie,
        )
    except NotFound as error:
        return refused(error, 404)
    except VaultError as error:
        return refused(error)
    return redirect(url)


@get(CALLBACK, opt=PUBLIC, include_in_schema=False)
async def callback(request: Request[Any, Any, Any]) -> Response[bytes]:
    browser = await open_browser(request)
    if browser.session is None:
        return refused(SignInRefused("upstream", "nobody is signed in"), 401)
    person = browser.session
    raw: bytes = request.scope["query_string"]
    try:
        pairs = parse_qsl(raw.decode("latin-1"), errors="strict", max_num_fields=MAX_FIELDS)
        said = dict(pairs)
        if len(said) != len(pairs):
            raise ValueError("a field stands there twice")
        vault = vault_of(services(request).mcp)
        consent = vault.consents.read(
            said.get("state", ""),
            org_id=person.org_id,
            began=person.user_id,
            browser=browser.cookie,
        )
        client = vault.client(consent.upstream)
        actor = browser.where.actor(person.user_id)
        await vault.consents.finish(consent, client, said, actor)
        await vault.told(person.org_id)
    except (ValueError, VaultError, NotFound, InvalidField) as error:
        return refused(error)
    return redirect(ACCOUNT)


routes = [start, callback]
