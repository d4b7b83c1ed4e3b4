"""Signing in by e-mail address and password alone: the organization is asked for where several are
right, and who does not know the password learns nothing of them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
import sqlalchemy as sa
from litestar import Litestar
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.auth.login import throttle
from gateway.auth.login.login import MOST_ORGS
from gateway.auth.login.sessions import CHALLENGE_LIFETIME_S
from gateway.auth.login.throttle import PAIR
from gateway.tenancy.member_tables import users
from tests.gateway.auth.browsing import desk_of, hidden, new_browser, sign_in
from tests.gateway.auth.conftest import Clock, Tenant, make_tenant, make_user

CHOICE = re.compile(r'name="choice" value="([^"]+)">([^<]*)<')
ELSEWHERE = "another horse battery"


@asynccontextmanager
async def verified(app: Litestar) -> AsyncIterator[list[str | None]]:
    """The hashes that passwords are compared with."""
    desk, seen = desk_of(app), []
    verify = desk.passwords.verify

    async def noting(password: str, stored: str | None) -> bool:
        seen.append(stored)
        return await verify(password, stored)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(desk.passwords, "verify", noting)
        yield seen


async def also_at(
    app: Litestar, db: AsyncEngine, name: str, email: str, password: str
) -> tuple[Tenant, str]:
    place = await make_tenant(db, name)
    hashed = await desk_of(app).passwords.hash(password)
    user = await make_user(db, place.org_id, email, role="admin", password_hash=hashed)
    return place, user


async def account_of(browser: httpx.AsyncClient) -> str:
    shown = await browser.get("/oauth/account")
    return shown.text if shown.status_code == 200 else ""


async def test_an_address_and_a_password_are_enough(
    browser: httpx.AsyncClient, ada: Tenant
) -> None:
    done = await sign_in(browser, "/oauth/login", email=ada.email.upper())
    assert (done.status_code, done.headers["location"]) == (303, "/console")
    assert ada.org_name in await account_of(browser)


async def test_the_password_says_which_of_several_organizations_is_meant(
    app: Litestar, browser: httpx.AsyncClient, ada: Tenant, db: AsyncEngine
) -> None:
    place, _ = await also_at(app, db, f"two-{ada.org_name}", ada.email, ELSEWHERE)
    done = await sign_in(browser, "/oauth/login", email=ada.email, password=ELSEWHERE)
    assert done.status_code == 303
    assert place.org_name in await account_of(browser)


async def test_where_it_is_right_at_several_one_is_chosen(
    app: Litestar, browser: httpx.AsyncClient, ada: Tenant, db: AsyncEngine, clock: Clock
) -> None:
    password = "correct horse battery"
    place, user_id = await also_at(app, db, f"same-{ada.org_name}", ada.email, password)
    await also_at(app, db, f"third-{ada.org_name}", ada.email, ELSEWHERE)
    asked = await sign_in(browser, "/oauth/login", email=ada.email)
    assert asked.status_code == 200 and "Which organization?" in asked.text
    found = {name: choice for choice, name in CHOICE.findall(asked.text)}
    assert found.keys() == {ada.org_name, place.org_name}, "not the one where it is wrong"
    sent = {**hidden(asked.text), "choice": found[place.org_name]}

    async with new_browser(app) as thief:
        form = hidden((await thief.get("/oauth/login")).text)
        stolen = await thief.post("/oauth/login", data={**form, "choice": sent["choice"]})
        assert stolen.status_code == 403, "a choice is of one browser"
    choice = sent["choice"]
    other = choice[:-1] + ("1" if choice.endswith("0") else "0")
    for broken in ("", "x", other, choice.replace("user_", "user_0")):
        refused = await browser.post("/oauth/login", data={**sent, "choice": broken})
        assert refused.status_code == 403
    clock.pass_s(CHALLENGE_LIFETIME_S)
    assert (await browser.post("/oauth/login", data=sent)).status_code == 403, "too late"
    clock.pass_s(-CHALLENGE_LIFETIME_S)

    done = await browser.post("/oauth/login", data=sent)
    assert (done.status_code, done.headers["location"]) == (303, "/console")
    assert place.org_name in await account_of(browser)
    async with db.begin() as conn:
        changed = sa.update(users).where(users.c.id == user_id)
        await conn.execute(changed.values(password_hash=None))
    again = await browser.post("/oauth/login", data=sent)
    assert again.status_code == 403, "signing in has made the browser another"


async def test_a_choice_ends_with_the_password(
    app: Litestar, browser: httpx.AsyncClient, ada: Tenant, db: AsyncEngine
) -> None:
    password = "correct horse battery"
    place, user_id = await also_at(app, db, f"more-{ada.org_name}", ada.email, password)
    for value in (None, await desk_of(app).passwords.hash(ELSEWHERE)):
        asked = await sign_in(browser, "/oauth/login", email=ada.email)
        found = {name: choice for choice, name in CHOICE.findall(asked.text)}
        async with db.begin() as conn:
            changed = sa.update(users).where(users.c.id == user_id)
            old = await conn.scalar(sa.select(users.c.password_hash).where(users.c.id == user_id))
            await conn.execute(changed.values(password_hash=value))
        sent = {**hidden(asked.text), "choice": found[place.org_name]}
        assert (await browser.post("/oauth/login", data=sent)).status_code == 403
        async with db.begin() as conn:
            await conn.execute(changed.values(password_hash=old))


async def test_who_does_not_know_the_password_learns_nothing(
    app: Litestar, browser: httpx.AsyncClient, ada: Tenant, db: AsyncEngine
) -> None:
    """The same words and the same work, whether there is nobody, one or many."""
    many = f"many@{ada.org_name}.example"
    for at in range(MOST_ORGS + 1):
        await also_at(app, db, f"{at}-{ada.org_name}", many, ELSEWHERE)
    said, work = set(), set()
    for email in ("nobody@example.com", ada.email, many, "x" * 100):
        async with verified(app) as seen:
            refused = await sign_in(browser, "/oauth/login", email=email, password="wrong one")
        assert refused.status_code == 403 and "set-cookie" not in refused.headers
        said.add(refused.text.partition('role="alert">')[2].partition("<")[0])
        work.add(len(seen))
    assert (len(said), work) == (1, {MOST_ORGS})
    for broken in ("x" * 400, "a\0b"):
        refused = await sign_in(browser, "/oauth/login", email=broken)
        assert refused.status_code == 403


async def test_guesses_are_bounded_alike_for_nobody_one_and_many(
    app: Litestar, ada: Tenant, db: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throttle, "PAIR", msgspec.structs.replace(PAIR, first_s=60.0))
    many = f"several@{ada.org_name}.example"
    for at in range(2):
        await also_at(app, db, f"b{at}-{ada.org_name}", many, ELSEWHERE)
    for last, email in enumerate(("nobody@example.com", ada.email, many)):
        async with new_browser(app, address=f"203.0.113.{last + 10}") as stranger:
            fields: dict[str, Any] = {"email": email, "password": "wrong password"}
            codes = [
                (await sign_in(stranger, "/oauth/login", **fields)).status_code
                for _ in range(PAIR.free + 1)
            ]
            assert codes == [403] * PAIR.free + [429], email
            if email == ada.email:
                named = await sign_in(stranger, "/oauth/login", **fields, org=ada.org_name)
                assert named.status_code == 429, "no other form gives more guesses"


async def test_who_got_in_before_gets_in_beside_a_stranger_who_guesses(
    app: Litestar, signed_in: httpx.AsyncClient, ada: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throttle, "PAIR", msgspec.structs.replace(PAIR, first_s=60.0))
    async with new_browser(app, address="203.0.113.77") as stranger:
        for _ in range(PAIR.free + 1):
            await sign_in(stranger, "/oauth/login", email=ada.email, password="wrong password")
    async with new_browser(app, address="203.0.113.77") as neighbour:
        neighbour.cookies = signed_in.cookies
        done = await sign_in(neighbour, "/oauth/login", email=ada.email)
        assert done.status_code == 303
