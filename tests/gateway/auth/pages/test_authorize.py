"""The authorization endpoint in front of a person: the whole flow, and each way in which it is
refused."""

from __future__ import annotations

import itertools
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
import sqlalchemy as sa
from litestar import Litestar
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.auth.login.sessions import end_sessions_of
from gateway.auth.oauth.authorization import authorize
from gateway.auth.oauth.clients.store import Client
from gateway.auth.oauth.rfc6749_authorize import DESCRIPTIONS, MAX_QUERY_LENGTH
from gateway.auth.oauth.tokens.grants import Code, redeem_code, select_grants
from gateway.auth.resources import MAX_RESOURCES
from gateway.auth.tables import oauth_consents
from gateway.db import tenant
from gateway.permissions import SCOPES
from gateway.routes.oauth import authorize as oauth_authorize
from gateway.routes.oauth.authorize import MEANINGS
from gateway.tenancy.member_tables import users
from gateway.tenancy.tables import projects
from tests.gateway.auth.browsing import (
    CALLBACK,
    CHALLENGE,
    ISSUER,
    answer_of,
    authorize_url,
    consent,
    desk_of,
    hidden,
    new_browser,
    query_of,
    register,
    sign_in,
)
from tests.gateway.auth.conftest import Clock, Tenant


async def redeem(app: Litestar, system_db: AsyncEngine, client: Client, code: str) -> Code:
    desk = desk_of(app)
    async with system_db.begin() as conn:
        found = await redeem_code(
            conn, desk.codes, code=code, client_id=client.id, now=desk.clock()
        )
    assert isinstance(found, Code)
    return found


async def test_a_session_that_ends_while_consent_is_given_gives_nothing(
    app: Litestar,
    signed_in: httpx.AsyncClient,
    client: Client,
    ada: Tenant,
    tenant_db: AsyncEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def overtaken(*args: Any) -> str:
        async with tenant(tenant_db, ada.org_id) as conn:
            await end_sessions_of(conn, org_id=ada.org_id, user_id=ada.user_id)
        return await authorize(*args)

    shown = await signed_in.get(authorize_url(query_of(client.id)))
    monkeypatch.setattr(oauth_authorize, "authorize", overtaken)
    assert answer_of(await consent(signed_in, shown))["error"] == "login_required"
    async with tenant(tenant_db, ada.org_id) as conn:
        assert (await conn.execute(select_grants(ada.org_id))).all() == []


async def test_from_the_client_over_login_and_consent_back_with_a_code(
    app: Litestar, browser: httpx.AsyncClient, client: Client, ada: Tenant, system_db: AsyncEngine
) -> None:
    url = authorize_url(query_of(client.id, nonce="n1", resource=f"{ISSUER}/v1/"))
    asked = await browser.get(url)
    assert asked.status_code == 303 and asked.headers["location"].startswith("/oauth/login?")
    back = await sign_in(browser, asked.headers["location"], email=ada.email)
    assert back.status_code == 303 and back.headers["location"].startswith("/oauth/authorize?")
    shown = await browser.get(back.headers["location"])
    assert "App" in shown.text and "https://client.example" in shown.text
    assert ada.email in shown.text and f"{ISSUER}/v1" in shown.text
    done = await consent(browser, shown)
    assert done.headers["location"].startswith(CALLBACK + "?")
    answer = answer_of(done)
    assert answer.keys() == {"code", "state", "iss"}
    assert (answer["state"], answer["iss"]) == ("xyz", ISSUER)
    found = await redeem(app, system_db, client, answer["code"])
    assert (found.user_id, found.org_id) == (ada.user_id, ada.org_id)
    assert (found.redirect_uri, found.code_challenge) == (CALLBACK, CHALLENGE)
    assert found.scopes == ["inference", "openid"] and found.resources == [f"{ISSUER}/v1"]
    assert found.nonce == "n1" and found.amr == ["pwd"] and found.project_id == ada.project_id
    assert found.auth_time == desk_of(app).clock()


async def test_consent_is_remembered_for_user_client_redirect_and_resource(
    app: Litestar, signed_in: httpx.AsyncClient, tenant_db: AsyncEngine, ada: Tenant, clock: Clock
) -> None:
    two = [CALLBACK, "https://client.example/other"]
    client = (await register(tenant_db, app, ada, redirect_uris=two)).client

    async def must_ask(**more: Any) -> bool:
        shown = await signed_in.get(authorize_url(query_of(client.id, **more)))
        assert shown.status_code in (200, 303)
        return shown.status_code == 200

    shown = await signed_in.get(authorize_url(query_of(client.id)))
    assert "code" in answer_of(await consent(signed_in, shown))
    assert not await must_ask()
    assert not await must_ask(scope="openid")
    assert "code" in answer_of(await signed_in.get(authorize_url(query_of(client.id))))
    none = await signed_in.get(authorize_url(query_of(client.id, prompt="none")))
    assert "code" in answer_of(none)
    assert await must_ask(scope="openid mcp:call")
    assert await must_ask(redirect_uri=two[1])
    assert await must_ask(resource=f"{ISSUER}/v1")
    assert await must_ask(prompt="consent")
    for scope in ("mcp:call", "openid mcp:call inference"):
        shown = await signed_in.get(authorize_url(query_of(client.id, scope=scope)))
        if shown.status_code == 200:
            await consent(signed_in, shown)
    assert not await must_ask(scope="openid mcp:call inference")


async def test_a_denial_is_an_answer_and_nothing_is_remembered(
    signed_in: httpx.AsyncClient,
    client: Client,
    db: AsyncEngine,
    tenant_db: AsyncEngine,
    ada: Tenant,
) -> None:
    shown = await signed_in.get(authorize_url(query_of(client.id)))
    answer = answer_of(await consent(signed_in, shown, "deny"))
    assert answer == {
        "error": "access_denied",
        "error_description": DESCRIPTIONS["access_denied"],
        "state": "xyz",
        "iss": ISSUER,
    }
    async with db.connect() as conn:
        assert (
            await conn.execute(
                sa.select(oauth_consents).where(oauth_consents.c.org_id == ada.org_id)
            )
        ).all() == []
    async with tenant(tenant_db, ada.org_id) as conn:
        assert (await conn.execute(select_grants(ada.org_id))).all() == []


async def test_an_application_on_the_users_machine_is_asked_for_each_time_on_any_port(
    app: Litestar, signed_in: httpx.AsyncClient, tenant_db: AsyncEngine, ada: Tenant
) -> None:
    made = await register(
        tenant_db,
        app,
        ada,
        redirect_uris=["http://127.0.0.1/cb"],
        token_endpoint_auth_method="none",
    )
    for port in (40000, 40001):
        uri = f"http://127.0.0.1:{port}/cb"
        query = query_of(made.client.id, redirect_uri=uri)
        shown = await signed_in.get(authorize_url(query))
        done = await consent(signed_in, shown)
        assert done.headers["location"].startswith(uri + "?code=")
        none = await signed_in.get(authorize_url({**query, "prompt": "none"}))
        assert answer_of(none)["error"] == "consent_required"


BAD_AND_STAYS = (
    {"client_id": None},
    {"client_id": "client_unknown"},
    {"client_id": "https://127.0.0.1/document"},
    {"redirect_uri": "https://evil.example/cb"},
    {"redirect_uri": CALLBACK + "/"},
    {"redirect_uri": CALLBACK + "?x=1"},
    {"redirect_uri": CALLBACK + "#f"},
    {"redirect_uri": "https://client.example:443/cb"},
    {"redirect_uri": "https://CLIENT.example/cb"},
    {"redirect_uri": "https://client.example@evil.example/cb"},
    {"redirect_uri": "https://\u0441lient.example/cb"},  # CYRILLIC SMALL LETTER ES
    {"redirect_uri": "https://client\u3002example/cb"},
    {"redirect_uri": "//client.example/cb"},
    {"redirect_uri": "javascript:alert(1)"},
    {"client_id": "client_\0"},
)


async def test_nobody_is_sent_where_client_and_redirect_do_not_belong_together(
    browser: httpx.AsyncClient, client: Client
) -> None:
    more = ({}, {"response_type": "token"}, {"prompt": "none"})
    for bad, others in itertools.product(BAD_AND_STAYS, more):
        query = {**query_of(client.id), **bad, **others}
        sent = {name: value for name, value in query.items() if value is not None}
        refused = await browser.get(authorize_url(sent))
        assert refused.status_code == 400 and "location" not in refused.headers, bad
        assert refused.headers["content-type"].startswith("text/html")


BAD_AND_GOES_BACK: tuple[tuple[dict[str, Any], str], ...] = (
    ({"response_type": "token"}, "unsupported_response_type"),
    ({"response_type": "code id_token"}, "unsupported_response_type"),
    ({"response_type": None}, "unsupported_response_type"),
    ({"response_type": "c\u043ede"}, "unsupported_response_type"),
    ({"response_type": "code\n"}, "unsupported_response_type"),
    ({"response_type": 'code"'}, "unsupported_response_type"),
    ({"scope": "openid \u0430dmin"}, "invalid_scope"),
    ({"prompt": "n\u043ene"}, "invalid_request"),
    ({"max_age": "\u0661"}, "invalid_request"),
    ({"code_challenge": None}, "invalid_request"),
    ({"code_challenge": None, "code_challenge_method": None}, "invalid_request"),
    ({"code_challenge_method": None}, "invalid_request"),
    ({"code_challenge_method": "plain"}, "invalid_request"),
    ({"code_challenge_method": "s256"}, "invalid_request"),
    ({"code_challenge": "c" * 42}, "invalid_request"),
    ({"code_challenge": "c" * 44}, "invalid_request"),
    ({"code_challenge": "." * 43}, "invalid_request"),
    ({"scope": "openid no:such"}, "invalid_scope"),
    ({"scope": "operator:orgs"}, "invalid_scope"),
    ({"scope": "  "}, "invalid_scope"),
    ({"resource": "/v1"}, "invalid_target"),
    ({"resource": "https://evil.example/v1"}, "invalid_target"),
    ({"resource": ISSUER + "/v1#f"}, "invalid_target"),
    ({"resource": [ISSUER + "/v1", "https://evil.example"]}, "invalid_target"),
    ({"resource": [ISSUER + "/v1"] * (MAX_RESOURCES + 1)}, "invalid_target"),
    ({"resource": ISSUER + "/mcp/org_" + "0" * 32}, "invalid_target"),
    ({"prompt": "none"}, "login_required"),
    ({"prompt": "none login"}, "invalid_request"),
    ({"prompt": "create"}, "invalid_request"),
    ({"max_age": "-1"}, "invalid_request"),
    ({"max_age": "1e9"}, "invalid_request"),
    ({"max_age": "9" * 10}, "invalid_request"),
    ({"nonce": "n" * 513}, "invalid_request"),
    ({"dpop_jkt": "short"}, "invalid_request"),
    ({"response_mode": "fragment"}, "invalid_request"),
    ({"request": "eyJ"}, "request_not_supported"),
    ({"request_uri": "https://client.example/r"}, "request_uri_not_supported"),
    ({"state": ["a", "b"]}, "invalid_request"),
    ({"scope": ["openid", "openid"]}, "invalid_request"),
    ({"code_challenge": [CHALLENGE, CHALLENGE]}, "invalid_request"),
    ({"nonce": ["a", "b"]}, "invalid_request"),
    ({"unknown": ["a", "b"]}, "invalid_request"),
)


async def test_every_other_error_goes_back_with_state_and_iss_and_constant_words(
    browser: httpx.AsyncClient, client: Client
) -> None:
    for bad, error in BAD_AND_GOES_BACK:
        refused = await browser.get(authorize_url(query_of(client.id, **bad)))
        assert refused.status_code == 303, bad
        assert refused.headers["location"].startswith(CALLBACK + "?")
        answer = answer_of(refused)
        assert (answer["error"], answer["iss"]) == (error, ISSUER), bad
        assert answer["state"] == ("a" if bad.get("state") else "xyz")
        assert answer["error_description"] == DESCRIPTIONS[error]


async def test_who_asks_and_where_it_goes_may_not_stand_there_twice(
    browser: httpx.AsyncClient, client: Client
) -> None:
    query = query_of(client.id)
    seconds = ("https://evil.example/cb", "", CALLBACK)
    for name, second in itertools.product(("client_id", "redirect_uri"), seconds):
        refused = await browser.get(authorize_url({**query, name: [query[name], second]}))
        assert refused.status_code == 400 and "location" not in refused.headers


async def test_a_query_is_bounded_and_strictly_encoded(
    browser: httpx.AsyncClient, client: Client
) -> None:
    good = urlencode(query_of(client.id))
    many = "&".join(f"p{n}=1" for n in range(65))
    for bad in ("state=" + "x" * MAX_QUERY_LENGTH, "x=%ff", many):
        refused = await browser.get(f"/oauth/authorize?{good}&{bad}")
        assert refused.status_code == 400, bad[:20]
    assert (await browser.get("/oauth/authorize")).status_code == 400


async def test_a_client_without_the_code_flow_gets_none(
    app: Litestar, browser: httpx.AsyncClient, tenant_db: AsyncEngine, ada: Tenant
) -> None:
    made = await register(tenant_db, app, ada, grant_types=["client_credentials"])
    refused = await browser.get(authorize_url(query_of(made.client.id)))
    assert answer_of(refused)["error"] == "unauthorized_client"


async def test_the_redirect_may_be_left_out_where_there_is_one_and_its_query_stays(
    app: Litestar, signed_in: httpx.AsyncClient, tenant_db: AsyncEngine, ada: Tenant
) -> None:
    one = await register(tenant_db, app, ada, redirect_uris=[CALLBACK + "?a=%20b"])
    shown = await signed_in.get(authorize_url(query_of(one.client.id, redirect_uri=None)))
    done = await consent(signed_in, shown)
    assert done.headers["location"].startswith(CALLBACK + "?a=%20b&code=")
    two = await register(tenant_db, app, ada, redirect_uris=[CALLBACK, CALLBACK + "2"])
    refused = await signed_in.get(authorize_url(query_of(two.client.id, redirect_uri=None)))
    assert refused.status_code == 400


async def test_a_state_comes_back_as_it_was_and_is_not_invented(
    signed_in: httpx.AsyncClient, client: Client
) -> None:
    for state in ("a b&c=d#e%20", "\u00e4\u2028<script>", None):
        shown = await signed_in.get(authorize_url(query_of(client.id, state=state)))
        if shown.status_code == 200:
            assert "<script>" not in shown.text
            shown = await consent(signed_in, shown)
        assert answer_of(shown).get("state") == state


async def test_scopes_are_no_more_than_the_client_and_the_role_have(
    app: Litestar,
    signed_in: httpx.AsyncClient,
    client: Client,
    ada: Tenant,
    db: AsyncEngine,
    system_db: AsyncEngine,
) -> None:
    async def ask(scope: str | None) -> httpx.Response:
        shown = await signed_in.get(authorize_url(query_of(client.id, scope=scope)))
        return await consent(signed_in, shown) if shown.status_code == 200 else shown

    async def granted(scope: str | None) -> list[str]:
        code = answer_of(await ask(scope))["code"]
        return (await redeem(app, system_db, client, code)).scopes

    assert await granted("openid admin:* email") == ["admin:*", "openid"]
    assert await granted(None) == ["inference", "mcp:call", "openid"]
    async with db.begin() as conn:
        await conn.execute(sa.update(users).values(role="reader"))
    assert answer_of(await ask("inference"))["error"] == "access_denied"
    assert answer_of(await ask("admin:*"))["error"] == "access_denied"
    assert await granted("openid") == ["openid"]
    async with db.begin() as conn:
        await conn.execute(sa.update(users).values(role="developer"))
    assert answer_of(await ask("inference"))["error"] == "access_denied", "no project to bill"


async def test_who_costs_has_a_live_project(
    signed_in: httpx.AsyncClient, client: Client, db: AsyncEngine
) -> None:
    shown = await signed_in.get(authorize_url(query_of(client.id)))
    async with db.begin() as conn:
        await conn.execute(sa.update(projects).values(archived_at=sa.func.now()))
    assert answer_of(await consent(signed_in, shown))["error"] == "access_denied"


async def test_a_resource_and_a_client_are_for_the_users_of_their_org(
    app: Litestar,
    signed_in: httpx.AsyncClient,
    tenant_db: AsyncEngine,
    other: Tenant,
    client: Client,
    ada: Tenant,
) -> None:
    theirs = (await register(tenant_db, app, other)).client
    none = await signed_in.get(authorize_url(query_of(theirs.id, prompt="none")))
    assert answer_of(none)["error"] == "login_required"
    sent = await signed_in.get(authorize_url(query_of(theirs.id)))
    shown = await signed_in.get(sent.headers["location"])
    assert f"<strong>{other.org_name}</strong>" in shown.text and 'name="org"' not in shown.text
    wrong = await sign_in(signed_in, sent.headers["location"], email=ada.email, org=ada.org_name)
    assert wrong.status_code == 403, "an account of acme is none of other"
    crossed = await signed_in.get(
        authorize_url(query_of(client.id, resource=f"{ISSUER}/mcp/{other.org_id}"))
    )
    assert answer_of(crossed)["error"] == "invalid_target"
    own = await signed_in.get(
        authorize_url(query_of(client.id, resource=f"{ISSUER}/mcp/{ada.org_id}"))
    )
    assert own.status_code == 200


async def test_max_age_and_prompt_login_ask_for_a_fresh_proof_once(
    app: Litestar,
    signed_in: httpx.AsyncClient,
    client: Client,
    ada: Tenant,
    clock: Clock,
    system_db: AsyncEngine,
) -> None:
    for more in ({"max_age": "60"}, {"prompt": "login"}, {"prompt": "select_account"}):
        clock.pass_s(61)
        query = query_of(client.id, **more)
        sent = await signed_in.get(authorize_url(query))
        location = sent.headers["location"]
        assert location.startswith("/oauth/login?"), more
        clock.pass_s(5)
        again = await signed_in.get(location.replace("/oauth/login", "/oauth/authorize"))
        assert again.headers["location"].startswith("/oauth/login?"), "the mark alone is nothing"
        back = await sign_in(signed_in, location, email=ada.email)
        clock.pass_s(5)
        shown = await signed_in.get(back.headers["location"])
        done = shown if shown.status_code == 303 else await consent(signed_in, shown)
        code = answer_of(done)["code"]
        assert (clock() - (await redeem(app, system_db, client, code)).auth_time).seconds == 5
    stale = {"max_age": "1", "prompt": "none"}
    clock.pass_s(10)
    refused = await signed_in.get(authorize_url(query_of(client.id, **stale)))
    assert answer_of(refused)["error"] == "login_required"


async def test_a_mark_that_is_not_ours_counts_for_nothing(
    signed_in: httpx.AsyncClient, client: Client
) -> None:
    for mark in ("x", "2999-01-01T00:00:00+00:00~" + "0" * 64, "~", "\u00e4~\u00e4"):
        query = query_of(client.id, prompt="login", tg_asked=mark)
        sent = await signed_in.get(authorize_url(query))
        assert sent.headers["location"].startswith("/oauth/login?")


async def test_a_consent_counts_only_from_its_own_page(
    app: Litestar, signed_in: httpx.AsyncClient, client: Client, ada: Tenant
) -> None:
    shown = await signed_in.get(authorize_url(query_of(client.id)))
    form = {**hidden(shown.text), "decision": "allow"}
    wider = {**form, "request": form["request"].replace("openid", "openid+admin%3A%2A")}
    assert wider["request"] != form["request"]

    async def post(data: dict[str, str], **headers: str) -> httpx.Response:
        return await signed_in.post("/oauth/authorize", data=data, headers=headers)

    without = {name: value for name, value in form.items() if name != "form_token"}
    for bad in (wider, without, {**form, "form_token": "x"}, {**form, "decision": "maybe"}):
        assert (await post(bad)).status_code == 403
    assert (await post({**form, "form_token": "\u00e4"})).status_code == 403
    crossed = await post(form, **{"sec-fetch-site": "cross-site"})
    assert crossed.status_code == 403
    assert (await post(form, **{"content-type": "text/plain"})).status_code == 403
    twice = urlencode([*form.items(), ("decision", "deny")])
    kind = {"content-type": "application/x-www-form-urlencoded"}
    doubled = await signed_in.post("/oauth/authorize", content=twice, headers=kind)
    assert doubled.status_code == 403
    for text in ("a=%ff", "a=\u00e4", "&".join(f"f{n}=1" for n in range(17))):
        broken = await signed_in.post("/oauth/authorize", content=text.encode(), headers=kind)
        assert broken.status_code == 403
    async with new_browser(app) as another:
        await sign_in(another, "/oauth/login", org=ada.org_name, email=ada.email)
        stolen = await another.post("/oauth/authorize", data=form)
        assert stolen.status_code == 403, "bound to the browser it was shown in"
    assert "code" in answer_of(await post(form))


async def test_who_signed_out_meanwhile_consents_to_nothing(
    signed_in: httpx.AsyncClient, client: Client, clock: Clock
) -> None:
    shown = await signed_in.get(authorize_url(query_of(client.id)))
    clock.pass_s(13 * 3600)
    done = await consent(signed_in, shown)
    assert done.headers["location"].startswith("/oauth/login?")


async def test_no_page_can_be_framed_cached_or_scripted(
    signed_in: httpx.AsyncClient, client: Client
) -> None:
    consent_page = await signed_in.get(authorize_url(query_of(client.id)))
    pages = [
        consent_page,
        await signed_in.get("/oauth/login"),
        await signed_in.get("/oauth/account"),
        await signed_in.get("/oauth/authorize"),
    ]
    for shown in pages:
        policy = shown.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in policy and "default-src 'none'" in policy
        assert "unsafe" not in policy and shown.headers["x-frame-options"] == "DENY"
        assert shown.headers["cache-control"] == "no-store"
        assert shown.headers["referrer-policy"] == "no-referrer"
        assert "<script>" not in shown.text and " style=" not in shown.text
        assert "onclick" not in shown.text and 'lang="en"' in shown.text
    assert (
        "form-action 'self' https://client.example;"
        in consent_page.headers["content-security-policy"]
    )


async def test_what_a_client_calls_itself_is_text(
    app: Litestar, signed_in: httpx.AsyncClient, tenant_db: AsyncEngine, ada: Tenant
) -> None:
    name = '<script>alert("x")</script>'
    made = await register(tenant_db, app, ada, client_name=name)
    shown = await signed_in.get(authorize_url(query_of(made.client.id)))
    assert name not in shown.text and "&lt;script&gt;" in shown.text


def test_every_scope_has_a_meaning() -> None:
    assert MEANINGS.keys() == SCOPES
