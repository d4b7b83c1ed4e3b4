"""From an invite's link to a user who is signed in."""

from __future__ import annotations

from urllib.parse import quote

import httpx
from litestar import Litestar
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db import tenant
from gateway.tenancy.members.invites import LIFETIME, create_invite
from tests.gateway.auth.browsing import PASSWORD, desk_of, hidden, sign_in
from tests.gateway.auth.conftest import ACTOR, Clock, Tenant


async def link(app: Litestar, db: AsyncEngine, owner: Tenant, email: str) -> str:
    desk = desk_of(app)
    async with tenant(db, owner.org_id) as conn:
        made = await create_invite(
            conn,
            org_id=owner.org_id,
            email=email,
            role="developer",
            projects=[],
            secret=desk.secret,
            actor=ACTOR,
            now=desk.clock(),
        )
    return f"/invites/accept?token={quote(made.token)}"


async def test_an_invite_is_accepted_once_and_its_user_signed_in(
    app: Litestar, browser: httpx.AsyncClient, tenant_db: AsyncEngine, ada: Tenant
) -> None:
    url = await link(app, tenant_db, ada, "bob@acme.example")
    shown = await browser.get(url)
    assert shown.status_code == 200 and "acme" in shown.text and "bob@acme.example" in shown.text
    form = {**hidden(shown.text), "name": "Bob"}
    assert (await browser.post("/invites/accept", data=form)).status_code == 400
    for weak in ("short", "bob@acme.example"):
        told = await browser.post("/invites/accept", data={**form, "password": weak})
        assert told.status_code == 400 and "password" in told.text
    nameless = await browser.post(
        "/invites/accept", data={**form, "name": "\u202e", "password": PASSWORD}
    )
    assert nameless.status_code == 400 and "Your name" in nameless.text
    without = {name: value for name, value in form.items() if name != "form_token"}
    crossed = await browser.post("/invites/accept", data={**without, "password": PASSWORD})
    assert crossed.status_code == 403
    done = await browser.post("/invites/accept", data={**form, "password": PASSWORD})
    assert done.headers["location"] == "/console"
    account = await browser.get("/oauth/account")
    assert "bob@acme.example, developer of acme" in account.text
    assert (await browser.get(url)).status_code == 404
    again = await browser.post("/invites/accept", data={**form, "password": PASSWORD})
    assert again.status_code in (403, 404)
    back = await sign_in(browser, "/oauth/login", org=ada.org_name, email="bob@acme.example")
    assert back.status_code == 303


async def test_an_old_or_unknown_link_leads_nowhere(
    app: Litestar, browser: httpx.AsyncClient, tenant_db: AsyncEngine, ada: Tenant, clock: Clock
) -> None:
    url = await link(app, tenant_db, ada, "bob@acme.example")
    shown = await browser.get(url)
    clock.now += LIFETIME
    for gone in (url, "/invites/accept", "/invites/accept?token=x"):
        assert (await browser.get(gone)).status_code == 404
    form = {**hidden(shown.text), "name": "Bob", "password": PASSWORD}
    assert (await browser.post("/invites/accept", data=form)).status_code == 404
