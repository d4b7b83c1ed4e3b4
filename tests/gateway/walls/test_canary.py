"""No secret that was ever issued stands anywhere but in the answer that issued it, and no prompt
anywhere: not in a log, an error, a metric, the spool or any other file, Redis, or any column of any
table.

The whole application runs, every kind of secret is issued, used rightly and wrongly; then
everything is searched, for each secret as text, hex and base64.
"""

from __future__ import annotations

import base64
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from litestar import Litestar
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from foundation.logs import JsonFormatter
from gateway.audit.log import COMMAND_LINE, Actor
from gateway.auth.login.sign_in_links import SignInLink, make_link
from gateway.auth.oauth.clients.metadata import from_document
from gateway.auth.oauth.clients.store import create_client, rotate_secret
from gateway.db import tenant
from gateway.secret import Secret
from gateway.tenancy.keys.keys import PEPPER_PURPOSE, create_key
from gateway.tenancy.member_tables import users
from gateway.tenancy.members.invites import create_invite
from gateway.tenancy.orgs import create_org
from gateway.tenancy.projects import create_project
from tests.gateway.auth.browsing import (
    CALLBACK,
    PASSWORD,
    VERIFIER,
    answer_of,
    authorize_url,
    consent,
    desk_of,
    hidden,
    live_app,
    new_browser,
    query_of,
    register,
    sign_in,
)
from tests.gateway.auth.conftest import Clock, Tenant, make_tenant
from tests.gateway.walls.issued_over_http import issue_over_http
from tests.gateway.walls.issued_secrets import NO_SECRETS, Witness, drawn_in_source, watch
from tests.gateway.walls.secret_search import TOKENS, Caller, Search

ACTOR = Actor(kind="system", id="test")
REFUSED = (400, 401, 429)
KEYS = "/v1/admin/keys"
EVENT = "budget.threshold_reached"
PROMPT = "a-prompt-of-a-project-that-stores-none"
BROKEN = "the log of audit is broken"


async def test_no_secret_is_anywhere_but_in_the_answer_that_issued_it(
    tmp_path: Path,
    postgres_url: str,
    redis_url: str,
    redis: Redis,
    db: AsyncEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    witness = watch(monkeypatch)
    search = Search(witness, PASSWORD, PROMPT)
    async with live_app(tmp_path, postgres_url, redis_url, Clock()) as app:
        call = Caller(app, search)
        acme = await make_tenant(db, "acme")
        operator = await issue_keys(app, call, db, tmp_path)
        await issue_to_members(app, db, acme, tmp_path)
        await issue_oauth(app, call, db, acme)
        await issue_over_http(app, call, operator)
        await use_wrongly(call, search)
        await break_down(app, call, operator)
        metrics = await call("GET", "/metrics")
        assert metrics.status_code == 200
        await app.state.services.authenticator.close()
        wanted = drawn_in_source() - set(NO_SECRETS)
        assert wanted - set(witness.drawn) == set(), "issue these too, or say why they are none"
        assert set(NO_SECRETS) <= drawn_in_source(), "no longer there: drop it from the list"
        assert len(search.issued) > 25
        await nothing_in_postgres(db, search)
        await nothing_in_redis(redis, search)
    formatter = JsonFormatter()
    # The test's own client logs what it asks.
    ours = [record for record in caplog.records if not record.name.startswith("http")]
    said = "\n".join(formatter.format(record) + repr(record.args) for record in ours)
    assert search.found_in(said) == [], "in a log"
    assert said.count(f"RuntimeError: {BROKEN}") >= 5, "tracebacks among them"
    searched = 0
    for path in tmp_path.rglob("*"):
        if path.is_file():
            searched += 1
            content = path.read_bytes()
            assert search.found_in(content.decode("latin-1")) == [], f"in {path.name}"
    assert searched >= 3, "the spool among them"


async def issue_keys(app: Litestar, call: Caller, db: AsyncEngine, home: Path) -> str:
    """Admin keys and for inference: made, repeated, rotated, reported. Returns an
    operator's."""
    secret = Secret.load(home / "secret.json").current
    pepper = {"pepper": secret.derive(PEPPER_PURPOSE), "pepper_id": secret.id}
    async with db.begin() as conn:
        org = await create_org(conn, name="operators", is_operator=True, actor=COMMAND_LINE)
        project = await create_project(conn, org_id=org.id, name="web", actor=COMMAND_LINE)
        admin = await create_key(
            conn,
            org_id=org.id,
            project_id=project.id,
            name="admin",
            scopes=["admin:*"],
            **pepper,
            actor=COMMAND_LINE,
        )
    body = {"name": "k", "project_id": project.id}
    once = {"idempotency-key": "once"}
    made = await call("POST", KEYS, admin.secret, json=body, headers=once)
    assert made.status_code == 201, made.text
    assert (await call("POST", KEYS, admin.secret, json=body, headers=once)).json() == made.json()
    path = f"{KEYS}/{made.json()['id']}"
    rotated = await call("POST", f"{path}/rotate", admin.secret, json={"grace_s": 60})
    assert rotated.status_code == 200
    for key in (made.json()["value"], rotated.json()["value"]):
        assert (await call("GET", "/v1/models", key)).status_code == 200
        chat = {"model": "b", "messages": [{"role": "user", "content": PROMPT}]}
        gone = await call("POST", "/v1/chat/completions", key, json=chat)
        assert gone.status_code == 503, "nobody is at the upstream"
    for seen in (path, KEYS, "/v1/organization/audit_logs"):
        assert (await call("GET", seen, admin.secret)).status_code == 200
    leak = {"key": made.json()["value"]}
    assert (await call("POST", f"{KEYS}/report-leak", json=leak)).status_code == 204
    # A key in the place of a name: it is refused, or at least not kept.
    pasted = {"name": made.json()["value"], "project_id": project.id}
    assert (await call("POST", KEYS, admin.secret, json=pasted)).status_code == 400
    return admin.secret


async def issue_to_members(app: Litestar, db: AsyncEngine, acme: Tenant, home: Path) -> None:
    async with tenant(db, acme.org_id) as conn:
        made = await create_invite(
            conn,
            org_id=acme.org_id,
            email="new@acme.example",
            role="reader",
            projects=[],
            secret=Secret.load(home / "secret.json"),
            actor=ACTOR,
        )
    assert made.token not in repr(made)
    hashed = await desk_of(app).passwords.hash(PASSWORD)
    async with db.begin() as conn:
        owner = sa.update(users).where(users.c.id == acme.user_id)
        await conn.execute(owner.values(password_hash=hashed))
        link = SignInLink(org_id=acme.org_id, user_id=acme.user_id, role="owner")
        desk = desk_of(app)
        for _ in range(2):
            token = await make_link(conn, desk.redis, link, secret=desk.secret, actor=ACTOR)
    async with new_browser(app) as browser:
        form = hidden((await browser.get(f"/oauth/link?token={token}")).text)
        assert (await browser.post("/oauth/link", data=form)).status_code == 303


async def issue_oauth(app: Litestar, call: Caller, db: AsyncEngine, acme: Tenant) -> None:
    """Client secrets, a session, a code, tokens, a refreshed one, a code used twice."""
    peppers = desk_of(app).clients.peppers
    robot = await register(
        db,
        app,
        acme,
        scopes=("openid", "inference", "offline_access"),
        token_endpoint_auth_method="client_secret_post",
        grant_types=["authorization_code", "refresh_token"],
    )
    stranger = await create_stranger(db, app)
    assert stranger.registration_access_token and robot.client_secret
    async with tenant(db, acme.org_id) as conn:
        fresh = await rotate_secret(
            conn,
            peppers,
            client_id=robot.client.id,
            org_id=acme.org_id,
            grace_s=60,
            actor=ACTOR,
            now=datetime.now(tz=UTC),
        )
    credentials = {"client_id": robot.client.id, "client_secret": fresh.client_secret}
    wanted = query_of(robot.client.id, scope="openid inference offline_access")
    async with new_browser(app) as browser:
        await sign_in(browser, "/oauth/login", org="acme", email=acme.email, password="wrong one")
        asked = await browser.get(authorize_url(wanted))
        back = await sign_in(browser, asked.headers["location"], org="acme", email=acme.email)
        shown = await browser.get(back.headers["location"])
        answer = answer_of(await consent(browser, shown))
        assert "code" in answer, answer
    code = answer["code"]
    form = {
        "grant_type": "authorization_code",
        "code": code,
        "redirect_uri": CALLBACK,
        "code_verifier": VERIFIER,
        **credentials,
    }
    wrong = await call("POST", "/oauth/token", data=form | {"client_secret": "tgcs_wrong"})
    assert wrong.status_code == 401
    tokens = await call("POST", "/oauth/token", data=form)
    assert tokens.status_code == 200, tokens.text
    found = tokens.json()
    assert set(TOKENS) <= set(found)
    seen = await call("GET", "/v1/models", found["access_token"])
    assert seen.status_code == 200, seen.text
    refresh = {"grant_type": "refresh_token", "refresh_token": found["refresh_token"]}
    renewed = await call("POST", "/oauth/token", data=refresh | credentials)
    assert renewed.status_code == 200, renewed.text
    told = {"token": found["access_token"], **credentials}
    assert (await call("POST", "/oauth/introspect", data=told)).json()["active"] is True
    assert (await call("POST", "/oauth/token", data=form)).status_code == 400, "used twice"
    assert (await call("POST", "/oauth/revoke", data=told)).status_code == 200


async def create_stranger(db: AsyncEngine, app: Litestar) -> Any:
    metadata = from_document({"client_name": "Stranger", "redirect_uris": [CALLBACK]})
    async with db.begin() as conn:
        return await create_client(
            conn,
            desk_of(app).clients.peppers,
            metadata=metadata,
            scopes=["openid"],
            actor=ACTOR,
            org_id=None,
        )


async def use_wrongly(call: Caller, search: Search) -> None:
    """Each secret where it does not belong, and nearly right where it does."""
    for secret in search.issued:
        if not secret.isascii() or len(secret) > 4000:
            continue
        for key in (secret, secret + "x", secret[:-1] + "~"):
            for path in ("/v1/models", KEYS, "/v1/organization/costs", "/oauth/userinfo"):
                assert (await call("GET", path, key)).status_code < 500, path
        await call("POST", f"{KEYS}/report-leak", json={"key": secret + "!"})
        form = {"grant_type": "refresh_token", "refresh_token": secret, "client_id": "client_x"}
        assert (await call("POST", "/oauth/token", data=form)).status_code in REFUSED
        form = {"grant_type": "authorization_code", "code": secret, "client_secret": secret}
        basic = httpx.BasicAuth("client_x", secret)
        assert (await call("POST", "/oauth/token", data=form)).status_code in REFUSED
        answer = await call("POST", "/oauth/introspect", data={"token": secret}, auth=basic)
        assert answer.status_code in REFUSED
        login = {"email": "ada@acme.example", "org": "acme", "password": secret}
        await call("POST", "/oauth/login", data=login)
        cookies = {"cookie": f"__Host-tollgate_session={secret}"}
        await call("GET", "/oauth/login", headers=cookies)


async def break_down(app: Litestar, call: Caller, operator: str) -> None:
    """Nobody expects what goes wrong here, with a secret that was just drawn at hand: each failure
    is logged with its traceback."""

    def fail(*_: Any) -> None:
        raise RuntimeError(BROKEN)

    key = (await call("GET", KEYS, operator)).json()["data"][0]["id"]
    client = {"client_name": "app", "token_endpoint_auth_method": "client_secret_post"}
    client |= {"redirect_uris": [CALLBACK]}
    users = await call("GET", "/v1/organization/users", operator)
    changes: list[tuple[str, Any]] = [
        ("/v1/admin/invites", {"email": "z@x.example", "role": "reader"}),
        ("/v1/admin/orgs", {"name": "broken", "owner_email": "z@x.example"}),
        ("/v1/admin/oauth/clients", client),
        ("/v1/organization/admin_api_keys", {"name": "broken"}),
        ("/v1/admin/webhooks", {"url": "https://hooks.example", "event_types": [EVENT]}),
        (f"{KEYS}/{key}/rotate", {"grace_s": 60}),
        (f"/v1/admin/users/{users.json()['data'][0]['id']}/password-reset", None),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.audit.log.digest", fail)
        for path, body in changes:
            failed = await call("POST", path, operator, json=body)
            assert failed.status_code == 500, (path, failed.text)
            assert BROKEN not in failed.text
        async with new_browser(app) as browser:
            form = {"org": "acme", "email": "ada@acme.example"}
            assert (await sign_in(browser, "/oauth/login", **form)).status_code == 500


async def nothing_in_postgres(db: AsyncEngine, search: Search) -> None:
    """Every row of every table, as text: bytea stands there in hex, arrays and jsonb as written."""
    tables = sa.text("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    rows_seen = 0
    async with db.connect() as conn:
        for table in await conn.scalars(tables):
            rows = list(await conn.scalars(sa.text(f'SELECT t::text FROM "{table}" t')))
            rows_seen += len(rows)
            assert search.found_in("\n".join(rows)) == [], f"in the table {table}"
    assert rows_seen > 30


async def nothing_in_redis(redis: Redis, search: Search) -> None:
    async for key in redis.scan_iter():
        kind = await redis.type(key)
        value: Any = {
            b"string": redis.get,
            b"hash": redis.hgetall,
            b"set": redis.smembers,
            b"list": lambda name: redis.lrange(name, 0, -1),
            b"zset": lambda name: redis.zrange(name, 0, -1, withscores=True),
        }[kind](key)
        assert search.found_in(f"{key!r} {await value!r}") == [], "in Redis"


def test_the_search_finds_what_is_there() -> None:
    witness = Witness()
    witness.drawn["x"] = ["sk-tg-canary"]
    search = Search(witness, PASSWORD)
    raw = b"sk-tg-canary"
    for text in (raw.decode(), raw.hex(), base64.b64encode(raw).decode(), f"<{PASSWORD}>"):
        assert len(search.found_in(f"... {text} ...")) == 1
    assert search.found_in("nothing") == []
