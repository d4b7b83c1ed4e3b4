"""Another password, by the old one on the account page or by an administrator's link; and what ends
with the old one."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import msgspec
import pytest
import sqlalchemy as sa
from litestar import Litestar
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.tables import entries
from gateway.auth.bearer import revocations
from gateway.auth.login import passwords, throttle
from gateway.auth.login.reset import LIFETIME, find_reset, make_reset
from gateway.auth.login.throttle import PAIR
from gateway.auth.oauth.clients.store import Client
from gateway.db import tenant
from gateway.tenancy.errors import NotFound
from gateway.tenancy.member_tables import users
from gateway.tenancy.tables import orgs
from tests.gateway.auth.browsing import (
    CALLBACK,
    PASSWORD,
    VERIFIER,
    SharedApplication,
    answer_of,
    authorize_url,
    consent,
    desk_of,
    hidden,
    new_browser,
    query_of,
    sign_in,
)
from tests.gateway.auth.conftest import ACTOR, Clock, Tenant, make_user
from tests.gateway.auth.login.test_throttle import end_waits

CHANGE, RESET = "/oauth/account/password", "/passwords/reset"
NEXT = "another horse, another battery"
DONE = "/oauth/account?password-changed"


async def change(browser: httpx.AsyncClient, **fields: str) -> httpx.Response:
    form = hidden((await browser.get("/oauth/account")).text)
    sent = {"current_password": PASSWORD, "password": NEXT, **form, **fields}
    return await browser.post(CHANGE, data=sent)


async def link(app: Litestar, db: AsyncEngine, whose: Tenant) -> str:
    desk = desk_of(app)
    async with tenant(db, whose.org_id) as conn:
        made = await make_reset(
            conn,
            org_id=whose.org_id,
            user_id=whose.user_id,
            secret=desk.secret,
            actor=ACTOR,
            now=desk.clock(),
        )
    assert made.token not in repr(made)
    return f"{RESET}?token={made.token}"


async def may_enter(app: Litestar, ada: Tenant, password: str) -> bool:
    async with new_browser(app, address="192.0.2.99") as other:
        tried = await sign_in(
            other, "/oauth/login", org=ada.org_name, email=ada.email, password=password
        )
    return tried.status_code == 303


async def test_a_new_password_signs_out_every_other_browser_and_ends_what_was_allowed(
    app: Litestar, signed_in: httpx.AsyncClient, ada: Tenant, client: Client
) -> None:
    asked = authorize_url(query_of(client.id, scope="openid offline_access"))
    answer = answer_of(await consent(signed_in, await signed_in.get(asked)))
    async with new_browser(app) as elsewhere:
        await sign_in(elsewhere, "/oauth/login", org=ada.org_name, email=ada.email)
        assert (await elsewhere.get("/oauth/account")).status_code == 200
        cookie = signed_in.cookies["__Host-tollgate_session"]
        done = await change(signed_in)
        assert done.headers["location"] == DONE
        told = await signed_in.get(DONE)
        assert told.status_code == 200 and "Your password was changed." in told.text
        assert signed_in.cookies["__Host-tollgate_session"] != cookie
        assert (await elsewhere.get("/oauth/account")).headers["location"] == "/oauth/login"
    async with new_browser(app) as thief:
        thief.cookies.set("__Host-tollgate_session", cookie)
        assert (await thief.get("/oauth/account")).status_code == 303, "the cookie of before"
        form = {
            "grant_type": "authorization_code",
            "code": answer["code"],
            "redirect_uri": CALLBACK,
            "code_verifier": VERIFIER,
            "client_id": client.id,
        }
        assert (await thief.post("/oauth/token", data=form)).status_code in (400, 401)
    assert (await signed_in.get(asked)).status_code == 200, "asked for consent again"
    assert await may_enter(app, ada, NEXT) and not await may_enter(app, ada, PASSWORD)


async def test_a_change_is_audited_without_the_password(
    db: AsyncEngine, signed_in: httpx.AsyncClient, ada: Tenant
) -> None:
    await change(signed_in)
    async with db.connect() as conn:
        found = sa.select(entries).where(
            entries.c.action == "user.updated", entries.c.org_id == ada.org_id
        )
        (written,) = await conn.execute(found)
    assert (written.actor_kind, written.actor_id) == ("user", ada.user_id)
    assert (written.target, written.ip) == (ada.user_id, "192.0.2.7")
    assert NEXT not in str(written) and PASSWORD not in str(written)


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        ({"current_password": "not the one"}, 403),
        ({"current_password": ""}, 403),
        ({"password": "short"}, 400),
        ({"password": "their e-mail"}, 400),
        ({"form_token": "made up"}, 403),
    ],
)
async def test_a_change_is_refused(
    app: Litestar, signed_in: httpx.AsyncClient, ada: Tenant, wrong: dict[str, str], status: int
) -> None:
    if wrong == {"password": "their e-mail"}:
        wrong = {"password": ada.email}
    refused = await change(signed_in, **wrong)
    assert refused.status_code == status
    assert (await signed_in.get("/oauth/account")).status_code == 200, "still signed in"
    assert await may_enter(app, ada, PASSWORD)


async def test_another_site_or_a_stranger_changes_none(
    app: Litestar, signed_in: httpx.AsyncClient
) -> None:
    form = {
        **hidden((await signed_in.get("/oauth/account")).text),
        "current_password": PASSWORD,
        "password": NEXT,
    }
    crossed = {"sec-fetch-site": "cross-site"}
    assert (await signed_in.post(CHANGE, data=form, headers=crossed)).status_code == 403
    async with new_browser(app) as stranger:
        assert (await stranger.post(CHANGE, data=form)).status_code == 403


async def test_a_browser_left_open_lets_nobody_guess(
    signed_in: httpx.AsyncClient,
    application: SharedApplication,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The first wait is of a second, which a busy machine takes for one guess.
    monkeypatch.setattr(throttle, "PAIR", msgspec.structs.replace(PAIR, first_s=60.0))
    tries = [await change(signed_in, current_password=f"guess {n}") for n in range(PAIR.free + 1)]
    assert [each.status_code for each in tries] == [403] * PAIR.free + [429]
    assert int(tries[-1].headers["retry-after"]) >= 1
    monkeypatch.setattr(passwords, "MAX_WAITING", -passwords.THREADS)
    await end_waits(application.redis)
    assert (await change(signed_in)).status_code == 503


async def test_of_two_changes_at_once_one_is_done(
    app: Litestar, signed_in: httpx.AsyncClient, ada: Tenant
) -> None:
    form = hidden((await signed_in.get("/oauth/account")).text) | {"current_password": PASSWORD}
    wanted = [f"{NEXT} {n}" for n in range(3)]
    done = await asyncio.gather(
        *(signed_in.post(CHANGE, data={**form, "password": each}) for each in wanted)
    )
    assert sorted(each.status_code for each in done) == [303, 403, 403]
    (kept,) = [each for each, answer in zip(wanted, done, strict=True) if answer.is_redirect]
    assert await may_enter(app, ada, kept)


async def test_a_change_that_nobody_heard_of_is_done_all_the_same(
    app: Litestar,
    signed_in: httpx.AsyncClient,
    ada: Tenant,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def deaf(*_: Any) -> bool:
        return False

    monkeypatch.setattr(revocations, "publish", deaf)
    assert (await change(signed_in)).headers["location"] == DONE
    assert await may_enter(app, ada, NEXT)


async def test_a_link_sets_another_password_once_and_signs_in(
    app: Litestar, browser: httpx.AsyncClient, tenant_db: AsyncEngine, ada: Tenant
) -> None:
    url = await link(app, tenant_db, ada)
    async with new_browser(app) as elsewhere:
        await sign_in(elsewhere, "/oauth/login", org=ada.org_name, email=ada.email)
        shown = await browser.get(url)
        assert shown.status_code == 200 and ada.email in shown.text
        assert shown.headers["referrer-policy"] == "no-referrer"
        form = {**hidden(shown.text), "password": NEXT}
        for weak in ("short", ada.email):
            told = await browser.post(RESET, data={**form, "password": weak})
            assert told.status_code == 400 and "password" in told.text
        crossed = await browser.post(RESET, data={**form, "form_token": "x"})
        assert crossed.status_code == 403
        done = await browser.post(RESET, data=form)
        assert done.headers["location"] == DONE
        assert (await elsewhere.get("/oauth/account")).status_code == 303, "signed out"
    assert ada.email in (await browser.get("/oauth/account")).text
    assert (await browser.get(url)).status_code == 404
    async with new_browser(app) as other:
        fresh = hidden((await other.get("/oauth/login")).text)
        again = await other.post(RESET, data={**form, "form_token": fresh["form_token"]})
        assert again.status_code in (403, 404)
    assert await may_enter(app, ada, NEXT) and not await may_enter(app, ada, PASSWORD)


async def test_of_two_who_use_a_link_at_once_one_gets_in(
    app: Litestar, browser: httpx.AsyncClient, tenant_db: AsyncEngine, ada: Tenant
) -> None:
    form = hidden((await browser.get(await link(app, tenant_db, ada))).text)
    sent = [{**form, "password": f"{NEXT} {n}"} for n in range(3)]
    done = await asyncio.gather(*(browser.post(RESET, data=each) for each in sent))
    assert sorted(each.status_code for each in done) == [303, 404, 404]


async def test_a_link_is_for_somebody_who_never_had_a_password(
    app: Litestar, browser: httpx.AsyncClient, tenant_db: AsyncEngine, acme: Tenant
) -> None:
    shown = await browser.get(await link(app, tenant_db, acme))
    done = await browser.post(RESET, data={**hidden(shown.text), "password": NEXT})
    assert done.headers["location"] == DONE
    assert await may_enter(app, acme, NEXT)


async def test_a_link_ends_by_its_hour_and_by_any_change_of_whom_it_is_for(
    app: Litestar,
    browser: httpx.AsyncClient,
    db: AsyncEngine,
    tenant_db: AsyncEngine,
    ada: Tenant,
    clock: Clock,
) -> None:
    url = await link(app, tenant_db, ada)

    async def status_after(**change: Any) -> int:
        async with db.begin() as conn:
            await conn.execute(sa.update(users).values(**change))
        return (await browser.get(url)).status_code

    assert (await browser.get(url)).status_code == 200
    assert await status_after(role="reader") == 404
    assert await status_after(role="owner") == 200
    assert await status_after(archived_at=sa.func.now()) == 404
    assert await status_after(archived_at=None) == 200
    later = url.replace(".1", ".2", 1)
    swapped = url[:-1] + ("0" if url[-1] != "0" else "1")
    for made_up in (RESET, f"{RESET}?token=x", later, swapped, url + "\u0660"):
        assert (await browser.get(made_up)).status_code == 404
    clock.now += LIFETIME - timedelta(seconds=1)
    assert (await browser.get(url)).status_code == 200
    clock.now += timedelta(seconds=1)
    assert (await browser.get(url)).status_code == 404
    url = await link(app, tenant_db, ada)
    async with db.begin() as conn:
        await conn.execute(sa.update(orgs).values(archived_at=sa.func.now()))
    assert (await browser.get(url)).status_code == 404


async def test_a_link_waits_while_too_many_passwords_are_hashed(
    app: Litestar,
    browser: httpx.AsyncClient,
    tenant_db: AsyncEngine,
    ada: Tenant,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    form = hidden((await browser.get(await link(app, tenant_db, ada))).text)
    with monkeypatch.context() as patch:
        patch.setattr(passwords, "MAX_WAITING", -passwords.THREADS)
        assert (await browser.post(RESET, data={**form, "password": NEXT})).status_code == 503
    assert (await browser.post(RESET, data={**form, "password": NEXT})).status_code == 303


async def test_whose_link_it_is_never_shows_their_hash(
    app: Litestar, tenant_db: AsyncEngine, system_db: AsyncEngine, ada: Tenant
) -> None:
    desk, url = desk_of(app), await link(app, tenant_db, ada)
    async with system_db.connect() as conn:
        token = url.partition("token=")[2]
        found = await find_reset(conn, token, secret=desk.secret, now=desk.clock())
    assert found.password_hash is not None and repr(found) == f"ResetUser({ada.user_id})"


async def test_nobody_makes_a_link_for_another_orgs_user(
    app: Litestar, tenant_db: AsyncEngine, ada: Tenant, other: Tenant
) -> None:
    with pytest.raises(NotFound):
        await link(app, tenant_db, msgspec.structs.replace(ada, user_id=other.user_id))


async def key_of(browser: httpx.AsyncClient) -> str:
    form = {**hidden((await browser.get("/oauth/account")).text), "name": "mine"}
    made = await browser.post("/oauth/account/admin-keys", data=form)
    return made.text.partition("<code>")[2].partition("</code>")[0]


async def test_an_administrator_makes_a_link_and_only_for_who_has_no_more_than_they(
    app: Litestar, db: AsyncEngine, signed_in: httpx.AsyncClient, ada: Tenant
) -> None:
    owner = {"authorization": f"Bearer {await key_of(signed_in)}"}
    reader = await make_user(db, ada.org_id, "r@acme.example", role="reader")
    async with new_browser(app) as http:
        path = f"/v1/admin/users/{reader}/password-reset"
        made = await http.post(path, headers=owner | {"idempotency-key": "1"})
        assert made.status_code == 201 and made.headers["cache-control"] == "no-store"
        shown = made.json()
        assert set(shown) == {"object", "user_id", "expires_at", "url", "mail"}
        again = await http.post(path, headers=owner | {"idempotency-key": "1"})
        assert again.json() == shown and again.headers["idempotent-replayed"] == "true"
        body = {"name": "members", "scopes": ["admin:members"]}
        less = (await http.post("/v1/admin/keys", json=body, headers=owner)).json()["value"]
        asked = {"authorization": f"Bearer {less}"}
        above = f"/v1/admin/users/{ada.user_id}/password-reset"
        assert (await http.post(above, headers=asked)).status_code == 403
        assert (await http.post(above, headers=owner, json={"x": 1})).status_code == 400
        nobody = "/v1/admin/users/user_nobody/password-reset"
        assert (await http.post(nobody, headers=owner)).status_code == 404
        found = urlsplit(shown["url"])
        assert found.path == RESET and len(parse_qs(found.query)["token"]) == 1
        page = await http.get(f"{found.path}?{found.query}")
        assert page.status_code == 200 and "r@acme.example" in page.text
    async with db.connect() as conn:
        kind = entries.c.action == "user.password_reset_created"
        (written,) = await conn.execute(
            sa.select(entries).where(kind, entries.c.org_id == ada.org_id)
        )
    assert (written.target, written.on_behalf_of) == (reader, ada.user_id)
    assert shown["url"].partition("token=")[2] not in str(written)


async def test_the_account_page_of_who_has_no_password_says_how_to_get_one(
    db: AsyncEngine, signed_in: httpx.AsyncClient
) -> None:
    form = hidden((await signed_in.get("/oauth/account")).text)
    async with db.begin() as conn:
        await conn.execute(sa.update(users).values(password_hash=None))
    shown = await signed_in.get("/oauth/account")
    assert CHANGE not in shown.text and "make a link" in shown.text
    sent = {**form, "current_password": PASSWORD, "password": NEXT}
    assert (await signed_in.post(CHANGE, data=sent)).status_code == 403
