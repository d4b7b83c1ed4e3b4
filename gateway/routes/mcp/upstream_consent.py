"""/oauth/upstream/{server}/start and /oauth/upstream/callback: a person lets us in at a server of
the MCP bridge, with the browser that they are signed in with here; /oauth/upstream/client is what
we are to issuers that know clients by a URL.

What comes back is taken from the browser, the person and the org that began it alone, and within
ten minutes. Who begins for a whole tenant is told so first, on a page: a link from elsewhere lends
nobody's account to all.
"""

from __future__ import annotations

import logging
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec
from litestar import Request, Response, get
from litestar.exceptions import NotFoundException
from litestar.params import FromPath

from gateway.auth.login.sessions import Session
from gateway.mcp.service.service import configured
from gateway.permissions import within
from gateway.routes.mcp.credentials import SCOPE
from gateway.routes.oauth.authorize import LOGIN
from gateway.routes.oauth.login import UPSTREAM
from gateway.routes.oauth.protected_resources import public_url
from gateway.routes.shared.access import PUBLIC, services
from gateway.routes.shared.browser import open_browser, page, redirect
from gateway.routes.shared.media_types import JSON
from gateway.tenancy.errors import InvalidField, NotFound
from gateway.vault.errors import IssuerUnavailable, SignInRefused, VaultError

log = logging.getLogger(__name__)

START = "/oauth/upstream/{server:str}/start"
CALLBACK = "/oauth/upstream/callback"
DOCUMENT = "/oauth/upstream/client"
ACCOUNT = "/oauth/account"
MAX_FIELDS = 16
HEADERS = {"cache-control": "public, max-age=3600"}


def refused(error: Exception, status: int = 403) -> Response[bytes]:
    log.info("a consent at an upstream was refused: %s", error)
    if isinstance(error, NotFound):
        status = 404
    elif isinstance(error, IssuerUnavailable):
        status = 502
    return page(
        "error",
        status=status,
        error="access_denied",
        description="Signing in at this server did not work. Sign in here first, and begin again.",
    )


def check_may(person: Session, server: str, *, for_tenant: bool) -> None:
    """For a whole tenant as for its credentials that are typed in. Raises: SignInRefused."""
    if for_tenant and not within(person.role, [SCOPE], is_operator=person.is_operator):
        raise SignInRefused(server, "whoever signs in there for all administers the organization")


def to_login(server: str, wanted: str | None) -> Response[bytes]:
    """Send the person to the sign-in page, from where they come back."""
    query = f"upstream={server}" + ("&for=tenant" if wanted == "tenant" else "")
    if UPSTREAM.fullmatch(query) is None:
        return refused(SignInRefused(server, "nobody is signed in"), 401)
    return redirect(f"{LOGIN}?{query}")


@get(START, opt=PUBLIC, include_in_schema=False)
async def start(request: Request[Any, Any, Any], server: FromPath[str]) -> Response[bytes]:
    """Send the person to the issuer.

    `?for=tenant`: for all who have no credential of their own there.
    """
    browser = await open_browser(request)
    if browser.session is None:
        return to_login(server, request.query_params.get("for"))
    person = browser.session
    try:
        sign_ins = configured(services(request).mcp).vault.sign_ins
        wanted = request.query_params.get("for")
        for_tenant = sign_ins.is_for_tenant(person.org_id, server, wanted)
        check_may(person, server, for_tenant=for_tenant)
        url = await sign_ins.start(
            server,
            org_id=person.org_id,
            user_id=person.user_id,
            for_tenant=for_tenant,
            browser=browser.cookie,
        )
    except (VaultError, NotFound) as error:
        return refused(error)
    if not for_tenant:
        return redirect(url)
    return page(
        "upstream_consent",
        server=server,
        org_name=person.org_name,
        email=person.email,
        destination=urlsplit(url).netloc,
        location=url,
    )


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
        vault = configured(services(request).mcp).vault
        consent = vault.sign_ins.read(
            said, org_id=person.org_id, began=person.user_id, browser=browser.cookie
        )
        check_may(person, consent.upstream, for_tenant=consent.user_id is None)
        actor = browser.where.actor(person.user_id)
        await vault.sign_ins.finish(consent, said, actor)
        await vault.told(person.org_id)
    except (ValueError, VaultError, NotFound, InvalidField) as error:
        return refused(error)
    return redirect(ACCOUNT)


@get(DOCUMENT, opt=PUBLIC, include_in_schema=False)
async def show_document(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Show our client document to everybody, as an issuer reads it that has never met us."""
    from gateway.mcp.sign_ins import own_document

    found = None if services(request).mcp is None else own_document(public_url(request))
    if found is None:
        raise NotFoundException
    return Response(msgspec.json.encode(found), media_type=JSON, headers=HEADERS)


routes = [start, callback, show_document]
