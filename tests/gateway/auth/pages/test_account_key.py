"""An owner who is signed in makes an admin key on the account page."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from litestar import Litestar
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.tables import entries
from gateway.tenancy.member_tables import users
from tests.gateway.auth.browsing import hidden, new_browser
from tests.gateway.auth.conftest import Tenant

PATH = "/oauth/account/admin-keys"
KEY = re.compile(r"<code>(sk-tg-admin-\w+)</code>")


async def form_of(browser: httpx.AsyncClient) -> dict[str, str]:
    return {**hidden((await browser.get("/oauth/account")).text), "name": "mine"}


async def role(db: AsyncEngine, ada: Tenant, role: str) -> None:
    async with db.begin() as conn:
        mine = sa.update(users).where(users.c.id == ada.user_id)
        await conn.execute(mine.values(role=role))


async def test_an_owner_makes_a_key_that_administers(
    app: Litestar, db: AsyncEngine, signed_in: httpx.AsyncClient, ada: Tenant
) -> None:
    made = await signed_in.post(PATH, data=await form_of(signed_in))
    assert made.status_code == 200 and made.headers["cache-control"] == "no-store"
    (key,) = KEY.findall(made.text)
    assert key not in (await signed_in.get("/oauth/account")).text, "this once"
    async with new_browser(app) as http:
        bearer = {"authorization": f"Bearer {key}"}
        listed = await http.get("/v1/organization/admin_api_keys", headers=bearer)
    (found,) = listed.json()["data"]
    assert (found["name"], found["owner"]["id"]) == ("mine", ada.user_id)
    async with db.connect() as conn:
        entry = sa.select(entries).where(
            entries.c.action == "api_key.created", entries.c.org_id == ada.org_id
        )
        (written,) = await conn.execute(entry)
    assert (written.actor_kind, written.actor_id) == ("user", ada.user_id)


@pytest.mark.parametrize("other", ["admin", "developer", "reader"])
async def test_nobody_else_makes_one(
    db: AsyncEngine, signed_in: httpx.AsyncClient, ada: Tenant, other: str
) -> None:
    form = await form_of(signed_in)
    await role(db, ada, other)
    assert (await signed_in.post(PATH, data=form)).status_code == 403
    assert PATH not in (await signed_in.get("/oauth/account")).text


@pytest.mark.parametrize(
    "wrong", [{"name": ""}, {"name": "x" * 101}, {"name": "sk-tg-" + "a" * 43}]
)
async def test_a_name_that_is_none_is_refused(
    signed_in: httpx.AsyncClient, wrong: dict[str, Any]
) -> None:
    refused = await signed_in.post(PATH, data=await form_of(signed_in) | wrong)
    assert refused.status_code == 400 and "needs a name" in refused.text
    assert not KEY.findall(refused.text) and "a" * 43 not in refused.text


async def test_another_site_or_a_stranger_makes_none(
    app: Litestar, signed_in: httpx.AsyncClient
) -> None:
    form = await form_of(signed_in)
    assert (await signed_in.post(PATH, data={"name": "mine"})).status_code == 403
    crossed = {"sec-fetch-site": "cross-site"}
    assert (await signed_in.post(PATH, data=form, headers=crossed)).status_code == 403
    async with new_browser(app) as stranger:
        assert (await stranger.post(PATH, data=form)).status_code == 403
