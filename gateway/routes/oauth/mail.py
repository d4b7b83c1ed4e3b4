"""/account/mail: whoever is signed in, or comes by the link of an e-mail that they were sent,
chooses what else they are sent.

The link's token stands in the form, so the page sends no referrer and keeps no copy. A mail
program's own button posts to the same address, without a cookie (RFC 8058): it switches off the
topic of its e-mail.
"""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from litestar import Request, Response, get

from gateway.audit.log import Actor
from gateway.db import tenant
from gateway.routes.oauth.authorize import LOGIN
from gateway.routes.shared.access import PUBLIC, services
from gateway.routes.shared.browser import (
    BadForm,
    Browser,
    FormRoute,
    auth_of,
    check_token,
    open_browser,
    page,
    read_form,
    redirect,
    remembering,
    stale_form,
)
from gateway.routes.shared.media_types import MULTIPART
from gateway.tenancy.errors import NotFound
from gateway.tenancy.members.mail_topics import TOPICS, Topic, choose_mail, topics_of
from gateway.tenancy.members.users import User, get_user
from gateway.tenancy.orgs import get_org
from gateway.webhooks.mail_channel import CHOICES_PATH

PURPOSE = "mail"


class MailReader(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody who chooses their e-mail. `token`: of the link; empty: they are signed in."""

    user: User
    org_name: str
    is_operator: bool
    token: str


async def find_reader(request: Request[Any, Any, Any], browser: Browser, token: str) -> MailReader:
    """Raises: NotFound: nobody is signed in and there is no link, or it is none of ours, or leads
    to somebody who has left."""
    found = services(request)
    if token:
        try:
            org_id, user_id = found.webhooks.choice_links.read(token)
        except ValueError:
            raise NotFound("token", "no such link") from None
    elif browser.session is not None:
        org_id, user_id = browser.session.org_id, browser.session.user_id
    else:
        raise NotFound("token", "nobody is signed in")
    async with tenant(found.db, org_id) as conn:
        user = await get_user(conn, org_id=org_id, user_id=user_id)
        org = await get_org(conn, org_id)
    if org.archived_at is not None:
        raise NotFound("org", "the organization is archived")
    return MailReader(user=user, org_name=org.name, is_operator=org.is_operator, token=token)


def actor_of(browser: Browser, reader: MailReader) -> Actor:
    where = browser.where
    return Actor(kind="user", id=reader.user.id, ip=where.address, request_id=where.request_id)


def choices_page(
    request: Request[Any, Any, Any], browser: Browser, reader: MailReader, *, saved: bool = False
) -> Response[bytes]:
    auth, user = auth_of(request), reader.user
    topics = topics_of(user.role, user.mail_choices, is_operator=reader.is_operator)
    response = page(
        "mail",
        action=CHOICES_PATH,
        email=user.email,
        role=user.role,
        org_name=reader.org_name,
        token=reader.token,
        topics=[(topic, TOPICS[topic].about, sent) for topic, sent in topics.items()],
        saved=saved,
        form_token=auth.seals.form_token(browser.cookie, PURPOSE),
    )
    return remembering(response, auth, browser)


def closed() -> Response[bytes]:
    return page(
        "error",
        status=404,
        error="invalid_request",
        description="This link is not good any more. Sign in to choose what you are sent.",
    )


@get(CHOICES_PATH, opt=PUBLIC, include_in_schema=False)
async def show(request: Request[Any, Any, Any]) -> Response[bytes]:
    browser, token = await open_browser(request), request.query_params.get("token", "")
    if not token and browser.session is None:
        return redirect(LOGIN)
    try:
        reader = await find_reader(request, browser, token)
    except NotFound:
        return closed()
    return choices_page(request, browser, reader)


async def is_button(request: Request[Any, Any, Any]) -> bool:
    """True if a mail program's button posts this, by the token of its link: RFC 8058 (3.2) lets it
    write its one field in either form."""
    if not request.query_params.get("token"):
        return False  # a session alone changes nothing by another site's form
    body, kind = await request.body(), request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() == MULTIPART:
        return b'name="List-Unsubscribe"' in body and b"One-Click" in body
    return body == b"List-Unsubscribe=One-Click"


@FormRoute(CHOICES_PATH, status_code=200)
async def choose(request: Request[Any, Any, Any]) -> Response[bytes]:
    try:
        is_one_click = await is_button(request)
        form = {} if is_one_click else await read_form(request)
        browser = await open_browser(request)
        if not is_one_click:
            check_token(auth_of(request), browser, form.get("form_token", ""), PURPOSE)
    except BadForm:
        return stale_form()
    query = request.query_params
    token = query.get("token", "") if is_one_click else form.get("token", "")
    try:
        reader = await find_reader(request, browser, token)
        user = reader.user
        if is_one_click:
            choices = {topic: False for topic in get_args(Topic) if topic == query.get("topic")}
        else:
            own = topics_of(user.role, user.mail_choices, is_operator=reader.is_operator)
            choices = {topic: topic in form for topic in own}
        async with tenant(services(request).db, user.org_id) as conn:
            user = await choose_mail(
                conn,
                org_id=user.org_id,
                user_id=user.id,
                choices=choices,
                actor=actor_of(browser, reader),
            )
    except NotFound:
        return closed()
    reader = msgspec.structs.replace(reader, user=user)
    return choices_page(request, browser, reader, saved=True)


routes = [show, choose]
