"""/oauth/link: a link signs its user in once, or makes the first owner; its hash alone is kept."""

from __future__ import annotations

import httpx
import pytest
import redis.asyncio
import sqlalchemy as sa
from litestar import Litestar
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.tables import entries
from gateway.auth.login.sign_in_links import (
    LIFETIME_S,
    PREFIX,
    SignInLink,
    first_owner,
    make_link,
    to_link,
)
from gateway.tenancy.errors import NotFound
from gateway.tenancy.member_tables import users
from gateway.tenancy.tables import orgs
from tests.gateway.auth.browsing import PASSWORD, SharedApplication, desk_of, hidden, new_browser
from tests.gateway.auth.conftest import ACTOR, Tenant


@pytest.fixture
def store(application: SharedApplication) -> redis.asyncio.Redis:
    return application.redis


async def made(app: Litestar, db: AsyncEngine, link: SignInLink) -> str:
    async with db.begin() as conn:
        desk = desk_of(app)
        return await make_link(conn, desk.redis, link, secret=desk.secret, actor=ACTOR)


def of(ada: Tenant) -> SignInLink:
    return SignInLink(org_id=ada.org_id, user_id=ada.user_id, role="owner")


async def opened(browser: httpx.AsyncClient, token: str) -> dict[str, str]:
    shown = await browser.get(f"/oauth/link?token={token}")
    assert shown.status_code == 200, shown.text
    return hidden(shown.text)


async def test_a_link_signs_in_once_and_looking_at_it_uses_nothing_up(
    app: Litestar,
    browser: httpx.AsyncClient,
    ada: Tenant,
    db: AsyncEngine,
    store: redis.asyncio.Redis,
) -> None:
    token = await made(app, db, of(ada))
    kept = [key async for key in store.scan_iter(f"{PREFIX}:*")]
    assert kept and not any(token.encode() in key for key in kept)
    assert 0 < await store.ttl(kept[0]) <= LIFETIME_S
    for _ in range(3):
        form = await opened(browser, token)
    done = await browser.post("/oauth/link", data=form)
    assert (done.status_code, done.headers["location"]) == (303, "/console")
    assert ada.email in (await browser.get("/oauth/account")).text
    async with new_browser(app) as late:
        assert (await late.get(f"/oauth/link?token={token}")).status_code == 404
    async with db.connect() as conn:
        told = sa.select(entries.c.action).where(entries.c.org_id == ada.org_id)
        actions = set((await conn.scalars(told)).all())
    assert {"user.sign_in_link_created", "login.succeeded"} <= actions


async def test_of_two_who_have_a_link_one_gets_in(
    app: Litestar, browser: httpx.AsyncClient, ada: Tenant, db: AsyncEngine
) -> None:
    token = await made(app, db, of(ada))
    async with new_browser(app) as other:
        first, second = await opened(browser, token), await opened(other, token)
        assert (await browser.post("/oauth/link", data=first)).status_code == 303
        assert (await other.post("/oauth/link", data=second)).status_code == 404
        assert (await other.get("/oauth/account")).status_code == 303, "not signed in"


async def test_a_link_is_of_the_role_that_its_user_had(
    app: Litestar, browser: httpx.AsyncClient, ada: Tenant, db: AsyncEngine
) -> None:
    token = await made(app, db, SignInLink(org_id=ada.org_id, user_id=ada.user_id, role="reader"))
    assert (await browser.get(f"/oauth/link?token={token}")).status_code == 404
    for broken in ("", "x" * 300, "é", token[:-1]):
        assert (await browser.get("/oauth/link", params={"token": broken})).status_code == 404
    good = await made(app, db, of(ada))
    form = await opened(browser, good)
    async with db.begin() as conn:
        one = sa.update(users).where(users.c.id == ada.user_id)
        await conn.execute(one.values(archived_at=sa.func.now()))
    assert (await browser.post("/oauth/link", data=form)).status_code == 404
    assert (await browser.post("/oauth/link", data={**form, "form_token": "x"})).status_code == 403


async def test_the_first_owner_is_made_by_a_link(
    app: Litestar, browser: httpx.AsyncClient, ada: Tenant, db: AsyncEngine
) -> None:
    async with db.begin() as conn:
        if await conn.scalar(sa.select(orgs.c.id).where(orgs.c.is_operator)) is None:
            with pytest.raises(NotFound):
                await first_owner(conn)
        operator = sa.update(orgs).where(orgs.c.id == ada.org_id)
        await conn.execute(operator.values(is_operator=True))
        found = await first_owner(conn)
        assert found.user_id == ada.user_id and found.org_id == ada.org_id
        demoted = sa.update(users).where(users.c.id == ada.user_id)
        await conn.execute(demoted.values(role="reader"))
        found = await first_owner(conn)
        assert found == SignInLink(org_id=ada.org_id)
    token = await made(app, db, found)
    form = await opened(browser, token)
    typed = {**form, "name": "Bo", "email": f"bo@{ada.org_name}.example", "password": PASSWORD}
    for wrong in ({"password": "short"}, {"email": "nobody"}, {"email": ada.email}):
        refused = await browser.post("/oauth/link", data={**typed, **wrong})
        assert refused.status_code == 400 and "Bo" in refused.text, wrong
    done = await browser.post("/oauth/link", data=typed)
    assert (done.status_code, done.headers["location"]) == (303, "/console"), done.text
    shown = (await browser.get("/oauth/account")).text
    assert typed["email"] in shown and "owner of" in shown
    async with new_browser(app) as late:
        assert (await late.get(f"/oauth/link?token={token}")).status_code == 404
    async with db.begin() as conn:
        operator = sa.update(orgs).where(orgs.c.id == ada.org_id)
        await conn.execute(operator.values(is_operator=False))


def test_where_a_link_leads() -> None:
    assert to_link("https://x.example/", "t") == "https://x.example/oauth/link?token=t"
