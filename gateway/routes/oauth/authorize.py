"""GET and POST /oauth/authorize: a client asks, a user who is signed in allows or denies it.

The page's form brings the whole request back, and it is checked again from the start: nothing is
kept between the two but what the user sees.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from litestar import Request, Response

from gateway.auth.errors import AuthUnavailable
from gateway.auth.login.sessions import Session
from gateway.auth.oauth.authorization import Authorization, authorize, was_allowed
from gateway.auth.oauth.rfc6749_authorize import (
    AuthorizationRefused,
    AuthorizationRequest,
    Parameters,
    check_request,
    grantable,
    must_sign_in,
    read_parameters,
    to_location,
)
from gateway.routes.shared.access import PUBLIC
from gateway.routes.shared.browser import (
    MAX_FORM_BYTES,
    BadForm,
    Browser,
    auth_of,
    check_token,
    open_browser,
    page,
    read_form,
    redirect,
    remembering,
    stale_form,
)
from gateway.routes.shared.media_types import HTML
from gateway.routes.shared.operations import RouteGroup
from gateway.wire.admin.oauth import AuthorizationQuery, ConsentForm

log = logging.getLogger(__name__)

AUTHORIZE, LOGIN = "/oauth/authorize", "/oauth/login"
PAGE = {HTML: str}
oauth = RouteGroup(tag="OAuth", opt=PUBLIC)
ALLOW, DENY = "allow", "deny"
MEANINGS: Mapping[str, str] = {
    "inference": "use the models, at your organization's cost",
    "mcp:call": "call tools, in your name",
    "usage:read": "read what was used and what it cost",
    "admin:*": "do everything that an administrator can do",
    "admin:read": "read all settings of your organization",
    "admin:projects": "make, change and archive projects",
    "admin:members": "invite, change and remove members",
    "admin:keys": "make, change and revoke API keys",
    "admin:clients": "make, change and archive applications like this one",
    "admin:issuers": "decide who else may say who you are",
    "admin:audit": "read the audit log",
    "admin:billing": "change prices and rate limits",
    "admin:content": "read what your organization's stored requests asked and were answered",
    "admin:mcp": "say which tools may be called, and approve calls",
    "operator:plans": "change the plans of this installation",
    "operator:prices": "change the prices of this installation",
    "operator:models": "change the models of this installation",
    "operator:servers": "add and change the MCP servers of this installation",
    "operator:signing_keys": "change the signing keys of this installation",
    "operator:orgs": "make and archive organizations of this installation",
    "openid": "know who you are",
    "profile": "read your name",
    "email": "read your e-mail address",
    "offline_access": "do all this while you are away, until you take it back",
}


async def find_request(auth: Authorization, query: str) -> tuple[AuthorizationRequest, Parameters]:
    """Raises: AuthorizationRefused."""
    parameters = read_parameters(query)
    client_id = parameters.get("client_id")
    try:
        client = None if client_id is None else await auth.clients.find(client_id)
    except AuthUnavailable as error:
        log.info("a client cannot be known at the moment: %s", error)
        raise AuthorizationRefused("temporarily_unavailable") from error
    return check_request(parameters, client, auth.issuer), parameters


def refuse(auth: Authorization, refused: AuthorizationRefused) -> Response[bytes]:
    """Tell the client, if it is known that it is the client; else the person."""
    if refused.redirect_uri is None:
        status = 503 if refused.error == "temporarily_unavailable" else 400
        return page(
            "error",
            status=status,
            error=refused.error,
            description=refused.description,
            client_asks=True,
        )
    location = to_location(
        refused.redirect_uri,
        auth.issuer,
        error=refused.error,
        error_description=refused.description,
        state=refused.state,
    )
    return redirect(location)


@oauth.get(
    AUTHORIZE,
    "Ask a person for access: sent on to the client, to the login, or shown a page",
    query=AuthorizationQuery,
    said={200: PAGE, 303: {}, 400: PAGE, 503: PAGE},
)
async def ask(request: Request[Any, Any, Any]) -> Response[bytes]:
    auth = auth_of(request)
    try:
        query = raw_query(request)
        asked, parameters = await find_request(auth, query)
        browser = await open_browser(request)
        session, login = signed_in_for(auth, asked, parameters, browser)
        if session is None:
            return redirect(login)
        scopes = grantable(asked, session)
        if await was_allowed(auth, asked, session, scopes):
            return await give(auth, asked, session, scopes, browser)
        if "none" in asked.prompts:
            raise asked.refuse("consent_required")
        return consent_page(auth, asked, parameters, session, scopes, browser)
    except AuthorizationRefused as refused:
        return refuse(auth, refused)


@oauth.post(
    AUTHORIZE,
    "What a person decided on the consent page",
    form=ConsentForm,
    status=303,
    said={400: PAGE, 403: PAGE, 503: PAGE},
    options={"request_max_body_size": MAX_FORM_BYTES},
)
async def decide(request: Request[Any, Any, Any]) -> Response[bytes]:
    auth = auth_of(request)
    try:
        form = await read_form(request)
        browser = await open_browser(request)
        query = form.get("request", "")
        check_token(auth, browser, form.get("form_token", ""), consent_purpose(query))
        decision = form.get("decision")
        if decision not in (ALLOW, DENY):
            raise BadForm
        asked, parameters = await find_request(auth, query)
        session, login = signed_in_for(auth, asked, parameters, browser)
        if session is None:
            return redirect(login)
        scopes = grantable(asked, session)
        if decision == DENY:
            raise asked.refuse("access_denied")
        return await give(auth, asked, session, scopes, browser)
    except BadForm:
        return stale_form()
    except AuthorizationRefused as refused:
        return refuse(auth, refused)


def raw_query(request: Request[Any, Any, Any]) -> str:
    """Raises: AuthorizationRefused."""
    raw: bytes = request.scope["query_string"]
    if not raw.isascii():
        raise AuthorizationRefused("invalid_request")
    return raw.decode("ascii")


def consent_purpose(query: str) -> str:
    """Bind the page's token to one request: it is worth nothing for another."""
    return f"consent {query}"


def signed_in_for(
    auth: Authorization, asked: AuthorizationRequest, parameters: Parameters, browser: Browser
) -> tuple[Session | None, str]:
    """Return the session, if it is good enough for this request; else None and where to sign in.

    Raises: AuthorizationRefused, where nobody may be asked.
    """
    now = auth.clock()
    mark = parameters.mark
    asked_at = None if mark is None else auth.seals.read_mark(mark, now=now)
    if not must_sign_in(asked, browser.session, asked_at=asked_at, now=now):
        return browser.session, ""
    if asked_at is None:
        mark = auth.seals.mark(now)
    return None, f"{LOGIN}?{parameters.query(mark)}"


async def give(
    auth: Authorization,
    asked: AuthorizationRequest,
    session: Session,
    scopes: frozenset[str],
    browser: Browser,
) -> Response[bytes]:
    actor = browser.where.actor(session.user_id)
    code = await authorize(auth, asked, session, scopes, actor)
    return redirect(to_location(asked.redirect_uri, auth.issuer, code=code, state=asked.state))


def consent_page(
    auth: Authorization,
    asked: AuthorizationRequest,
    parameters: Parameters,
    session: Session,
    scopes: frozenset[str],
    browser: Browser,
) -> Response[bytes]:
    query = parameters.query(parameters.mark)
    other = {**parameters.values, "prompt": "select_account"}
    somebody_else = Parameters(
        values=other, resources=parameters.resources, repeated=frozenset(), mark=None
    )
    response = page(
        "consent",
        destinations=(asked.destination,),
        client=asked.client,
        session=session,
        destination=asked.destination,
        resources=asked.resources,
        native=not asked.remembers,
        scopes=[{"name": name, "meaning": MEANINGS[name]} for name in sorted(scopes)],
        form_token=auth.seals.form_token(browser.cookie, consent_purpose(query)),
        request=query,
        other_account=f"{AUTHORIZE}?{somebody_else.query()}",
    )
    return remembering(response, auth, browser)


routes = [ask, decide]
