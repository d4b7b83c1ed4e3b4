"""Signing in and out: passwords, bounds on guessing, sessions and their cookies."""

from __future__ import annotations

import asyncio
from statistics import median
from time import process_time
from typing import Any
from urllib.parse import quote

import argon2
import httpx
import msgspec
import pytest
import sqlalchemy as sa
from argon2.profiles import RFC_9106_LOW_MEMORY
from litestar import Litestar
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.tables import entries
from gateway.auth.login import passwords, throttle
from gateway.auth.login.login import LoginOrigin, WrongCredentials
from gateway.auth.login.passwords import Passwords, PasswordsBusy, WeakPassword, check_strength
from gateway.auth.login.sessions import (
    SESSION_LIFETIME_S,
    end_session,
    end_sessions_of,
    find_session,
)
from gateway.auth.login.throttle import PAIR
from gateway.auth.tables import oauth_sessions
from gateway.console import assets
from gateway.db import tenant
from gateway.tenancy.member_tables import users
from tests.gateway.auth.browsing import PASSWORD, desk_of, hidden, new_browser, sign_in
from tests.gateway.auth.conftest import ACTOR, Clock, Tenant

SESSION = "__Host-tollgate_session"


async def is_signed_in(browser: httpx.AsyncClient) -> bool:
    shown = await browser.get("/oauth/account")
    assert shown.status_code in (200, 303)
    return bool(shown.status_code == 200)


async def test_a_session_is_a_new_cookie_that_only_this_host_over_tls_can_read(
    browser: httpx.AsyncClient, ada: Tenant, db: AsyncEngine
) -> None:
    await browser.get("/oauth/login")
    before = browser.cookies[SESSION]
    done = await sign_in(browser, "/oauth/login", org=ada.org_name, email=ada.email.upper())
    for header in done.headers.get_list("set-cookie"):
        low = header.lower()
        assert header.startswith("__Host-") and "secure" in low and "httponly" in low
        assert "samesite=lax" in low and "path=/" in low and "domain" not in low
    assert browser.cookies[SESSION] != before, "nobody can plant theirs"
    assert await is_signed_in(browser)
    async with db.connect() as conn:
        rows = (
            await conn.execute(
                sa.select(oauth_sessions).where(oauth_sessions.c.org_id == ada.org_id)
            )
        ).all()
    assert len(rows) == 1 and browser.cookies[SESSION] not in str(rows)


async def test_whatever_is_wrong_the_answer_is_the_same(
    browser: httpx.AsyncClient, ada: Tenant, other: Tenant
) -> None:
    texts = set()
    for fields in (
        {"org": ada.org_name, "email": ada.email, "password": "wrong password"},
        {"org": ada.org_name, "email": "nobody@acme.example"},
        {"org": "other", "email": ada.email},
        {"org": "nowhere", "email": ada.email},
        {"org": "other", "email": other.email},
        {"org": ada.org_name, "email": ada.email, "password": "x" * 257},
    ):
        refused = await sign_in(browser, "/oauth/login", **fields)
        assert refused.status_code == 403 and "set-cookie" not in refused.headers
        assert "wrong password" not in refused.text.replace("password is wrong", "")
        texts.add(refused.text.partition('role="alert">')[2].partition("<")[0])
    assert len(texts) == 1
    assert not await is_signed_in(browser)
    long = {"org": ada.org_name, "email": "x" * 400}
    assert (await sign_in(browser, "/oauth/login", **long)).status_code == 403


def test_a_password_costs_what_rfc_9106_says(real_parameters: argon2.Parameters) -> None:
    assert real_parameters == RFC_9106_LOW_MEMORY


async def test_an_unknown_user_takes_as_long_as_a_known_one(
    real_parameters: argon2.Parameters,
) -> None:
    known = Passwords(argon2.PasswordHasher.from_parameters(real_parameters))
    stored = await known.hash(PASSWORD)

    async def took(against: str | None) -> float:
        times = []
        for _ in range(5):
            started = process_time()
            assert not await known.verify("wrong password", against)
            times.append(process_time() - started)
        return median(times)

    of_somebody, of_nobody = await took(stored), await took(None)
    assert of_nobody > of_somebody / 3 and of_somebody > of_nobody / 3
    assert not await known.verify("nobody has this password", None)
    assert not await known.verify(PASSWORD, "not a hash")
    known.close()


async def test_passwords_are_checked_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passwords, "MAX_WAITING", 1)
    bounded = Passwords()
    results = await asyncio.gather(
        *(bounded.hash(PASSWORD) for _ in range(8)), return_exceptions=True
    )
    assert sum(isinstance(each, PasswordsBusy) for each in results) == 8 - passwords.THREADS - 1
    assert await bounded.verify(
        "\ufb01ne passwords here", await bounded.hash("fine passwords here")
    )
    bounded.close()


@pytest.mark.parametrize("weak", ["", "short", "a" * 30, "abababababababab", "x" * 257])
def test_a_weak_password_is_told_so(weak: str) -> None:
    with pytest.raises(WeakPassword):
        check_strength(weak)
    with pytest.raises(WeakPassword):
        check_strength("someone@example.com", "Someone@Example.com")
    check_strength(PASSWORD)


async def test_guessing_is_bounded_but_locks_nobody_out_where_they_got_in(
    app: Litestar,
    signed_in: httpx.AsyncClient,
    ada: Tenant,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The first wait is of a second, which a busy machine takes for one guess.
    monkeypatch.setattr(throttle, "PAIR", msgspec.structs.replace(PAIR, first_s=60.0))
    fields: dict[str, Any] = {"org": ada.org_name, "email": ada.email, "password": "wrong password"}
    async with new_browser(app, address="203.0.113.9") as stranger:
        codes = [
            (await sign_in(stranger, "/oauth/login", **fields)).status_code
            for _ in range(PAIR.free + 2)
        ]
        assert codes == [403] * PAIR.free + [429] * 2
        right = await sign_in(stranger, "/oauth/login", org=ada.org_name, email=ada.email)
        assert right.status_code == 429, "not even with the right one: it could be a guess"
        assert int(right.headers["retry-after"]) >= 1
    assert await is_signed_in(signed_in), "a session goes on"
    async with new_browser(app) as at_home:
        done = await sign_in(at_home, "/oauth/login", org=ada.org_name, email=ada.email)
        assert done.status_code == 303, "the owner's own address"
    async with new_browser(app, address="203.0.113.9") as neighbour:
        neighbour.cookies = signed_in.cookies
        done = await sign_in(neighbour, "/oauth/login", org=ada.org_name, email=ada.email)
        assert done.status_code == 303, "the owner's own browser, beside the stranger"


async def test_a_password_that_changes_while_it_is_checked_is_wrong(
    app: Litestar, ada: Tenant, db: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = desk_of(app)
    where = LoginOrigin(address=None, request_id=None, device_cookie=None)
    asked = {"org": ada.org_name, "email": ada.email, "password": PASSWORD}
    done = await desk.login.by_password(**asked, origin=where)
    assert repr(done) == f"SignedIn({ada.user_id})", "its cookies reach no log"
    changed, verify = await desk.passwords.hash("another password"), desk.passwords.verify

    async def overtaken(password: str, stored: str | None) -> bool:
        found = await verify(password, stored)
        async with db.begin() as conn:
            await conn.execute(sa.update(users).values(password_hash=changed))
        return found

    monkeypatch.setattr(desk.passwords, "verify", overtaken)
    with pytest.raises(WrongCredentials):
        await desk.login.by_password(**asked, origin=where)


async def test_guesses_at_nobodys_account_are_bounded_too(
    browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throttle, "PAIR", msgspec.structs.replace(PAIR, first_s=60.0))
    fields: dict[str, Any] = {"org": "nowhere", "email": "nobody@example.com"}
    codes = [
        (await sign_in(browser, "/oauth/login", **fields)).status_code for _ in range(PAIR.free + 1)
    ]
    assert codes == [403] * PAIR.free + [429]


async def test_a_session_ends_by_logout_by_time_by_a_new_password_and_with_its_user(
    app: Litestar,
    signed_in: httpx.AsyncClient,
    ada: Tenant,
    db: AsyncEngine,
    tenant_db: AsyncEngine,
    clock: Clock,
) -> None:
    async def again() -> None:
        await sign_in(signed_in, "/oauth/login", org=ada.org_name, email=ada.email)
        assert await is_signed_in(signed_in)

    cookie = signed_in.cookies[SESSION]
    account = await signed_in.get("/oauth/account")
    without = await signed_in.post("/oauth/logout", data={})
    assert without.status_code == 403 and await is_signed_in(signed_in)
    out = await signed_in.post("/oauth/logout", data=hidden(account.text))
    assert out.status_code == 200 and not await is_signed_in(signed_in)
    signed_in.cookies.set(SESSION, cookie, domain="tollgate.example")
    assert not await is_signed_in(signed_in), "the old cookie is nobody's"
    stale = await signed_in.post("/oauth/logout", data=hidden(account.text))
    assert stale.status_code == 403
    signed_in.cookies.clear()
    await again()
    async with tenant(tenant_db, ada.org_id) as conn:
        peppers, now = desk_of(app).sessions, clock()
        session = await find_session(conn, peppers, signed_in.cookies[SESSION], now=now)
        assert session is not None
        for _ in range(2):  # by two tabs at once
            await end_session(conn, session, actor=ACTOR)
        outs = sa.select(sa.func.count()).where(
            entries.c.action == "logout.succeeded", entries.c.org_id == ada.org_id
        )
        assert await conn.scalar(outs) == 2, "one for each session"
    assert not await is_signed_in(signed_in)
    await again()
    clock.pass_s(SESSION_LIFETIME_S)
    assert not await is_signed_in(signed_in)
    await again()
    async with tenant(tenant_db, ada.org_id) as conn:
        await end_sessions_of(conn, org_id=ada.org_id, user_id=ada.user_id)
    assert not await is_signed_in(signed_in)
    await again()
    async with db.begin() as conn:
        await conn.execute(sa.update(users).values(archived_at=sa.func.now()))
    assert not await is_signed_in(signed_in)


async def test_a_login_form_counts_only_in_the_browser_that_was_shown_it(
    app: Litestar, browser: httpx.AsyncClient, ada: Tenant
) -> None:
    shown = await browser.get("/oauth/login")
    form = {**hidden(shown.text), "org": ada.org_name, "email": ada.email, "password": PASSWORD}
    async with new_browser(app) as victim:
        planted = await victim.post("/oauth/login", data=form)
        assert planted.status_code == 403 and not await is_signed_in(victim)
        await victim.get("/oauth/login")
        assert (await victim.post("/oauth/login", data=form)).status_code == 403


async def test_a_login_leads_nowhere_but_to_our_own_pages(
    browser: httpx.AsyncClient, ada: Tenant
) -> None:
    for query in ("next=https://evil.example", "redirect_uri=https://evil.example", "//evil"):
        shown = await browser.get(f"/oauth/login?{query}")
        assert shown.status_code == 400
    form = hidden((await browser.get("/oauth/login")).text)
    sent = {**form, "org": ada.org_name, "email": ada.email, "password": PASSWORD}
    refused = await browser.post("/oauth/login", data={**sent, "request": "https://evil.example"})
    assert refused.status_code == 400 and "location" not in refused.headers


async def test_a_login_leads_back_to_the_page_of_the_console_that_asked_for_it(
    browser: httpx.AsyncClient, ada: Tenant
) -> None:
    asked = await browser.get("/console/keys?project=a%20b&after=key_1")
    assert asked.status_code == 303
    done = await sign_in(browser, asked.headers["location"], org=ada.org_name, email=ada.email)
    assert done.headers["location"] == "/console/keys?project=a%20b&after=key_1"


async def test_who_is_signed_in_has_the_rights_of_their_role_in_the_console(
    signed_in: httpx.AsyncClient, ada: Tenant
) -> None:
    shown = await signed_in.get("/console/keys")
    assert shown.status_code == 200 and "Make the key" in shown.text
    nowhere = await signed_in.get("/console/nothing", headers={"accept": "text/html"})
    assert nowhere.status_code == 404 and "There is no such page." in nowhere.text


@pytest.mark.parametrize(
    "where",
    [
        "https://evil.example",
        "//evil.example/console",
        "/console.evil.example",
        "/consoles",
        "/console/\\evil",
        "/console/%0d%0aset-cookie:x",
        "/oauth/logout",
        "/console/" + "a" * 3000,
    ],
)
async def test_a_login_leads_nowhere_else(browser: httpx.AsyncClient, where: str) -> None:
    sent = where if "%" in where else quote(where, safe="")
    assert (await browser.get(f"/oauth/login?next={sent}")).status_code == 400


async def test_the_files_of_the_pages_are_served_and_no_others(browser: httpx.AsyncClient) -> None:
    for name, kind in (("console.css", "text/css"), ("passkeys.js", "text/javascript")):
        found = await browser.get(assets.address_of(name))
        assert found.status_code == 200 and found.headers["content-type"].startswith(kind)
        assert "immutable" in found.headers["cache-control"]
    for name in ("console.css", "console.0000000000000000.css", "pages.py"):
        assert (await browser.get(f"{assets.ADDRESS}/{name}")).status_code == 404
