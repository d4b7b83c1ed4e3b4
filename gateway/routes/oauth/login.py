"""The pages on which people sign in and out: /oauth/login, /oauth/logout, /oauth/account. On the
account page an owner makes an admin key for themselves, which never has more power than
they have, and ends with them.

Where somebody is sent after signing in is made here out of a request that was checked, never taken
from a parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import sqlalchemy as sa
from litestar import Request, Response, get
from redis.exceptions import RedisError

from gateway.audit.errors import CredentialInAudit
from gateway.auth.errors import AuthUnavailable
from gateway.auth.federation.issuer_directory import ListedIssuer
from gateway.auth.federation.issuers import Issuer
from gateway.auth.login.login import OrgChoice, SignedIn, WrongCredentials
from gateway.auth.login.passwords import MIN_LENGTH, PasswordsBusy
from gateway.auth.login.sessions import Session, end_session
from gateway.auth.login.throttle import AttemptLimit, TooManyAttempts
from gateway.auth.oauth.authorization import Authorization
from gateway.auth.oauth.rfc6749_authorize import AuthorizationRefused
from gateway.console.pages import CONSOLE, is_place
from gateway.db import tenant
from gateway.permissions import within
from gateway.principal import SCOPE_ADMIN
from gateway.routes.oauth.authorize import AUTHORIZE, LOGIN, find_request, raw_query, refuse
from gateway.routes.organization.keys import ADMIN_KEY_SCOPES
from gateway.routes.shared.access import PUBLIC, services
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
    signed_out,
    stale_form,
)
from gateway.tenancy.errors import InvalidField
from gateway.tenancy.keys.keys import create_key
from gateway.tenancy.tables import orgs

ACCOUNT = "/oauth/account"
ADMIN_KEYS = ACCOUNT + "/admin-keys"
BACK = re.compile(r"next=([A-Za-z0-9%._~-]{1,6000})", re.ASCII)
"""The query of somebody whom a page of the console sent here, with its address."""
FINDS_ORG = "find_org=1"
"""Begins the query of a login through a provider that is to tell whose account it is."""
UPSTREAM = re.compile(r"upstream=([a-z0-9-]{1,24})(&for=tenant)?", re.ASCII)
"""The query of somebody who is to sign in at a server of the MCP bridge (`upstream_consent`)."""
PASSWORD_CHANGED = "password-changed"
"""The query behind a redirect to the account page."""
LOGIN_PURPOSE, ACCOUNT_PURPOSE = "login", "account"
WRONG = "The organization, the address or the password is wrong."
WRONG_PAIR = "The address or the password is wrong."
TOO_LATE = "That took too long, or the password was changed. Sign in again."
CHANGED = "Your password was changed."
NO_PROVIDER = "No organization of this name signs in through a provider."
NO_ACCOUNT = "This address has no account yet. Name the organization that it should be of."
BUSY = "Too many people sign in at the moment. Try again shortly."
EACH_FINDS = AttemptLimit(name="address", free=20, first_s=1.0, longest_s=300.0, lifetime_s=900.0)
ALL_FIND = AttemptLimit(name="all", free=10_000, first_s=1.0, longest_s=60.0, lifetime_s=600.0)
PASSWORD_ERRORS = (WrongCredentials, TooManyAttempts, PasswordsBusy, RedisError, OSError)
"""Why a password cannot be checked, or is not taken."""


class Occasion(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why somebody signs in: to answer a client, to go on at a page of ours,
    or (all of it empty) for themselves."""

    query: str = ""
    client_name: str | None = None
    org_id: str | None = None
    org_name: str | None = None
    destination: str | None = None
    email: str = ""
    providers: tuple[tuple[str, str], ...] = ()
    """Name and address of each external provider of the org."""
    finds_providers: bool = False
    """Several organizations have some, and nobody has said which it is."""
    has_several: bool = False
    """The providers are those of organizations where somebody has accounts, by their names."""

    @property
    def location(self) -> str:
        """Return where it goes on."""
        return onward(self.query)


def explain(error: Exception, *, wrong: str) -> dict[str, Any]:
    """Return the status, problem and headers of a page after one of PASSWORD_ERRORS."""
    if isinstance(error, WrongCredentials):
        return {"status": 403, "problem": wrong}
    if isinstance(error, TooManyAttempts):
        seconds = math.ceil(error.delay_s)
        return {
            "status": 429,
            "problem": f"Too many attempts. Try again in {seconds} seconds.",
            "headers": {"retry-after": str(seconds)},
        }
    return {"status": 503, "problem": BUSY}


def onward(query: str) -> str:
    """Return the place where somebody goes on who signed in for what the query asks: a page of ours
    that it names, or the endpoint of authorization, which reads it anew."""
    if not query:
        return CONSOLE
    return page_in(query) or f"{AUTHORIZE}?{query}"


def page_in(query: str) -> str | None:
    """Return the page of ours that a query names; None: it names none."""
    elsewhere = UPSTREAM.fullmatch(query)
    if elsewhere is not None:
        more = "" if elsewhere[2] is None else "?for=tenant"
        return f"/oauth/upstream/{elsewhere[1]}/start{more}"
    sent = BACK.fullmatch(query)
    if sent is None:
        return None
    where = unquote(sent[1])
    return where if is_place(where) else None


async def read_occasion(auth: Authorization, query: str) -> Occasion:
    """Raises: AuthorizationRefused."""
    if not query or page_in(query) is not None:
        providers, several = await read_providers(auth, None, query)
        return Occasion(query=query, providers=providers, finds_providers=several)
    asked, parameters = await find_request(auth, query)
    name = None
    if asked.org_id is not None:
        async with auth.system_db.connect() as conn:
            live = sa.select(orgs.c.name).where(orgs.c.id == asked.org_id)
            name = await conn.scalar(live.where(orgs.c.archived_at.is_(None)))
        if name is None:
            raise asked.refuse("invalid_target")
    query = parameters.query(parameters.mark)
    providers, several = await read_providers(auth, asked.org_id, query)
    return Occasion(
        query=query,
        providers=providers,
        finds_providers=several,
        client_name=asked.client.name,
        org_id=asked.org_id,
        org_name=name,
        destination=asked.destination,
        email=parameters.get("login_hint") or "",
    )


async def read_providers(
    auth: Authorization, org_id: str | None, query: str
) -> tuple[tuple[tuple[str, str], ...], bool]:
    """Return the providers of an org; None: of the only one that has any, or none and that several
    have some."""
    try:
        if org_id is None:
            known = await auth.external.orgs_with_logins()
            if len(known) != 1:
                return (), bool(known)
            [org_id] = known
        return to_providers(await auth.external.logins_of(org_id), query), False
    except AuthUnavailable:
        return (), False  # the page has other ways in


def to_providers(
    found: Sequence[Issuer], query: str, *, finds_org: bool = False
) -> tuple[tuple[str, str], ...]:
    """Return the name and address of each. `finds_org`: they are of several organizations, and
    named by their hosts; the names that those gave them are for who belongs there."""
    if not finds_org:
        return tuple((each.name, start_of(each, query)) for each in found)
    query = f"{FINDS_ORG}&{query}" if query else FINDS_ORG
    return tuple((urlsplit(each.issuer).netloc, start_of(each, query)) for each in found)


def start_of(issuer: Issuer, query: str) -> str:
    return f"/oauth/external/{issuer.id}/start?{query}"


async def ask_org(auth: Authorization, browser: Browser, query: str) -> Response[bytes]:
    """Ask somebody for their organization who has come back from a provider and has no account."""
    try:
        occasion = await read_occasion(auth, query)
    except AuthorizationRefused as refused:
        return refuse(auth, refused)
    return login_page(auth, browser, occasion, problem=NO_ACCOUNT, asks_org=True, status=403)


def choose_org(
    auth: Authorization, browser: Browser, listed: Sequence[ListedIssuer], query: str
) -> Response[bytes]:
    """Let somebody choose who has come back from a provider and has accounts in several
    organizations."""
    found = tuple((each.org_name, start_of(each.issuer, query)) for each in listed)
    return login_page(auth, browser, Occasion(query=query, providers=found, has_several=True))


def login_page(
    auth: Authorization,
    browser: Browser,
    occasion: Occasion,
    *,
    status: int = 200,
    problem: str | None = None,
    org: str = "",
    email: str | None = None,
    headers: dict[str, str] | None = None,
    choices: Sequence[OrgChoice] = (),
    asks_org: bool = False,
) -> Response[bytes]:
    """Show the login page. `choices`: the organizations among which somebody is to choose;
    `asks_org`: they are to name theirs."""
    response = page(
        "login",
        choices=choices,
        asks_org=asks_org,
        finds_providers=occasion.finds_providers,
        has_several=occasion.has_several,
        status=status,
        headers=headers,
        destinations=() if occasion.destination is None else (occasion.destination,),
        client_name=occasion.client_name,
        org_name=occasion.org_name,
        providers=occasion.providers,
        problem=problem,
        form_token=auth.seals.form_token(browser.cookie, LOGIN_PURPOSE),
        request=occasion.query,
        org=org,
        email=occasion.email if email is None else email,
    )
    return remembering(response, auth, browser)


@get(LOGIN, opt=PUBLIC, include_in_schema=False)
async def show_login(request: Request[Any, Any, Any]) -> Response[bytes]:
    auth = auth_of(request)
    try:
        occasion = await read_occasion(auth, raw_query(request))
    except AuthorizationRefused as refused:
        return refuse(auth, refused)
    return login_page(auth, await open_browser(request), occasion)


@FormRoute(LOGIN)
async def sign_in(request: Request[Any, Any, Any]) -> Response[bytes]:
    auth = auth_of(request)
    try:
        form, browser = await read_sent(request, LOGIN_PURPOSE)
        occasion = await read_occasion(auth, form.get("request", ""))
    except BadForm:
        return stale_form()
    except AuthorizationRefused as refused:
        return refuse(auth, refused)
    org, email, wrong = form.get("org", "").strip(), form.get("email", ""), WRONG
    if "provider" in form and occasion.finds_providers:
        return await find_provider(auth, browser, occasion, org=org, email=email)
    try:
        if "choice" in form:
            wrong, choice = TOO_LATE, form["choice"]
            done: SignedIn | list[OrgChoice] = await auth.login.by_choice(
                choice, cookie=browser.cookie, origin=browser.where
            )
        elif named := occasion.org_id or org:
            password = form.get("password", "")
            done = await auth.login.by_password(
                org=named, email=email, password=password, origin=browser.where
            )
        else:
            wrong, password = WRONG_PAIR, form.get("password", "")
            done = await auth.login.by_email(
                email=email, password=password, cookie=browser.cookie, origin=browser.where
            )
    except PASSWORD_ERRORS as error:
        failure = explain(error, wrong=wrong)
        return login_page(auth, browser, occasion, org=org, email=email, **failure)
    if isinstance(done, list):
        return login_page(auth, browser, occasion, email=email, choices=done)
    return signed_in(redirect(occasion.location), auth, done)


async def find_provider(
    auth: Authorization, browser: Browser, occasion: Occasion, *, org: str, email: str
) -> Response[bytes]:
    """Show the providers of the organization that somebody names, or of those that know the domain
    of their address: of several, the address that the provider then verifies tells which. Where
    none is found, ask for its name. Nothing here depends on whether it knows the address itself."""
    typed: dict[str, Any] = {"org": org, "email": email}
    try:
        await auth.throttle.count(
            "provider", address=browser.where.address, each=EACH_FINDS, all_=ALL_FIND
        )
        finds_org = False
        if org:
            found = await auth.external.logins_of_named(org)
        else:
            async with auth.system_db.connect() as conn:
                found, finds_org = await auth.external.logins_by_email(conn, email)
    except (TooManyAttempts, RedisError, OSError, AuthUnavailable) as error:
        return login_page(auth, browser, occasion, **typed, **explain(error, wrong=NO_PROVIDER))
    if not found:
        problem = NO_PROVIDER if org else None
        return login_page(auth, browser, occasion, **typed, problem=problem, asks_org=True)
    providers = to_providers(found, occasion.query, finds_org=finds_org)
    occasion = msgspec.structs.replace(occasion, providers=providers)
    return login_page(auth, browser, occasion, **typed)


@get(ACCOUNT, opt=PUBLIC, include_in_schema=False)
async def show_account(request: Request[Any, Any, Any]) -> Response[bytes]:
    auth = auth_of(request)
    browser = await open_browser(request)
    if browser.session is None:
        return redirect(LOGIN)
    notice = CHANGED if request.url.query == PASSWORD_CHANGED else None
    return await account_page(auth, browser, browser.session, notice=notice)


async def account_page(
    auth: Authorization,
    browser: Browser,
    session: Session,
    *,
    problem: str | None = None,
    notice: str | None = None,
    admin_key: str | None = None,
    status: int = 400,
    headers: dict[str, str] | None = None,
) -> Response[bytes]:
    """Show the account page.

    `status`: where there is a problem. `admin_key`: one that was just made, shown this once.
    """
    return page(
        "account",
        status=200 if problem is None else status,
        headers=headers,
        session=session,
        notice=notice,
        min_length=MIN_LENGTH,
        passkeys=await auth.passkeys.list(session),
        problem=problem,
        admin_keys=ADMIN_KEYS if may_make_admin_key(session) else None,
        admin_key=admin_key,
        form_token=auth.seals.form_token(browser.cookie, ACCOUNT_PURPOSE),
    )


def may_make_admin_key(session: Session) -> bool:
    return SCOPE_ADMIN in within(session.role, [SCOPE_ADMIN])


async def read_account_form(
    request: Request[Any, Any, Any],
) -> tuple[Browser, Session, dict[str, str]]:
    """Read a form of somebody who is signed in. Raises: BadForm."""
    form, browser = await read_sent(request, ACCOUNT_PURPOSE)
    if browser.session is None:
        raise BadForm
    return browser, browser.session, form


@FormRoute("/oauth/logout", status_code=200)
async def sign_out(request: Request[Any, Any, Any]) -> Response[bytes]:
    auth = auth_of(request)
    try:
        browser, session, _ = await read_account_form(request)
    except BadForm:
        return stale_form()
    async with tenant(auth.db, session.org_id) as conn:
        await end_session(conn, session, actor=browser.where.actor(session.user_id))
    return signed_out(page("signed_out"), auth)


@FormRoute(ADMIN_KEYS, status_code=200)
async def make_admin_key(request: Request[Any, Any, Any]) -> Response[bytes]:
    auth = auth_of(request)
    try:
        browser, session, form = await read_account_form(request)
    except BadForm:
        return stale_form()
    if not may_make_admin_key(session):
        return stale_form()
    pepper_id, pepper = services(request).authenticator.pepper
    try:
        async with tenant(auth.db, session.org_id) as conn:
            made = await create_key(
                conn,
                org_id=session.org_id,
                project_id=None,
                user_id=session.user_id,
                name=form.get("name", "").strip(),
                scopes=ADMIN_KEY_SCOPES,
                pepper=pepper,
                pepper_id=pepper_id,
                actor=browser.where.actor(session.user_id),
            )
    except (InvalidField, CredentialInAudit):
        problem = "A key needs a name of 1 to 100 printable characters."
        return await account_page(auth, browser, session, problem=problem)
    return await account_page(auth, browser, session, admin_key=made.secret)


routes = [show_login, sign_in, show_account, make_admin_key, sign_out]
