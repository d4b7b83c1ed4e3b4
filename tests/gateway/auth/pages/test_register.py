"""Dynamic registration (RFC 7591, 7592) and the administration of clients, at the live app."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import sqlalchemy as sa
from litestar import Litestar
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.auth.oauth.clients.store import STRANGERS, Client
from gateway.auth.oauth.rfc6749_errors import DESCRIPTIONS
from gateway.auth.oauth.rfc7591_register import EACH, MAX_BODY_BYTES
from gateway.auth.tables import oauth_clients, oauth_grants, revocations
from gateway.db import tenant
from gateway.tenancy.keys.keys import PEPPER_PURPOSE, create_key
from tests.gateway.auth.browsing import (
    CALLBACK,
    ISSUER,
    answer_of,
    authorize_url,
    consent,
    desk_of,
    new_browser,
    query_of,
)
from tests.gateway.auth.conftest import ACTOR, Tenant
from tests.shared_application import on_one_loop

DOCUMENT: dict[str, Any] = {"client_name": "Agent", "redirect_uris": [CALLBACK]}
CLIENTS = "/v1/admin/oauth/clients"


async def test_a_client_registers_reads_itself_and_leaves(
    app: Litestar, browser: httpx.AsyncClient, db: AsyncEngine
) -> None:
    asked = {**DOCUMENT, "token_endpoint_auth_method": "none", "scope": "openid admin:* no:such"}
    made = await browser.post("/oauth/register", json=asked)
    assert made.status_code == 201 and made.headers["cache-control"] == "no-store"
    told = made.json()
    assert told["client_id"].startswith("client_") and "client_secret" not in told
    assert told["scope"] == "openid", "nothing of administration, and what was left out is told"
    uri = told["registration_client_uri"].removeprefix(ISSUER)
    token = told["registration_access_token"]
    headers = {"authorization": f"Bearer {token}"}
    read = await browser.get(uri, headers=headers)
    assert read.status_code == 200 and read.json()["redirect_uris"] == [CALLBACK]
    assert "registration_access_token" not in read.json()
    for bad in ({}, {"authorization": "Bearer x"}, {"authorization": "Bearer " + "x" * 300}):
        for method in ("GET", "DELETE"):
            refused = await browser.request(method, uri, headers=bad)
            assert refused.status_code == 401 and refused.json()["error"] == "invalid_token"
    assert (await browser.delete(uri, headers=headers)).status_code == 204
    assert (await browser.get(uri, headers=headers)).status_code == 401
    async with db.connect() as conn:
        assert token not in str((await conn.execute(sa.select(oauth_clients))).all())


async def test_a_registered_client_gets_to_a_user_by_consent(
    signed_in: httpx.AsyncClient, ada: Tenant, db: AsyncEngine
) -> None:
    made = (await signed_in.post("/oauth/register", json=DOCUMENT)).json()
    assert made["client_secret"].startswith("tg-secret-") and made["client_secret_expires_at"] == 0
    assert set(made["scope"].split()) == STRANGERS
    shown = await signed_in.get(authorize_url(query_of(made["client_id"])))
    assert "vouched" in shown.text
    assert "code" in answer_of(await consent(signed_in, shown))
    refused = await signed_in.get(authorize_url(query_of(made["client_id"], scope="admin:*")))
    assert answer_of(refused)["error"] == "invalid_scope"
    uri = made["registration_client_uri"].removeprefix(ISSUER)
    token = {"authorization": f"Bearer {made['registration_access_token']}"}
    assert (await signed_in.delete(uri, headers=token)).status_code == 204
    async with db.connect() as conn:
        (grant,) = await conn.execute(
            sa.select(oauth_grants).where(oauth_grants.c.org_id == ada.org_id)
        )
        (told,) = await conn.execute(
            sa.select(revocations).where(revocations.c.org_id == ada.org_id)
        )
    assert grant.revoked_because == "client_archived", "what it was allowed leaves with it"
    assert (told.kind, told.subject, told.org_id) == ("client", made["client_id"], grant.org_id)


async def test_what_cannot_be_registered_is_refused_by_its_field(
    browser: httpx.AsyncClient,
) -> None:
    for document, error in (
        ({"redirect_uris": ["https://\u0441lient.example/cb"]}, "invalid_redirect_uri"),
        ({"redirect_uris": ["http://client.example/cb"]}, "invalid_redirect_uri"),
        ({}, "invalid_redirect_uri"),
        ({**DOCUMENT, "grant_types": ["client_credentials"]}, "invalid_client_metadata"),
        ({**DOCUMENT, "client_name": 5}, "invalid_client_metadata"),
        ([], "invalid_client_metadata"),
    ):
        refused = await browser.post("/oauth/register", json=document)
        field = "grant_types" if "grant_types" in document else "client_name"
        field = (
            "redirect_uris" if error == "invalid_redirect_uri" else field if document else "body"
        )
        told = {"error": error, "error_description": DESCRIPTIONS[error], "field": field}
        assert refused.status_code == 400 and refused.json() == told, document
    for body in (b"", b"{", b"\xff", b"[" * 100_000):
        refused = await browser.post("/oauth/register", content=body[:MAX_BODY_BYTES])
        assert refused.json()["error"] == "invalid_client_metadata"
    large = await browser.post("/oauth/register", content=b" " * (MAX_BODY_BYTES + 1))
    assert large.status_code == 413 and large.json()["error"] == "invalid_request"


async def test_an_address_registers_a_bounded_number(app: Litestar) -> None:
    async with new_browser(app) as here, new_browser(app, address="198.51.100.1") as there:
        answers = [await here.post("/oauth/register", json=DOCUMENT) for _ in range(EACH.free + 1)]
        assert [each.status_code for each in answers] == [201] * EACH.free + [429]
        assert int(answers[-1].headers["retry-after"]) > 0
        assert answers[-1].json()["error"] == "temporarily_unavailable"
        assert (await there.post("/oauth/register", json=DOCUMENT)).status_code == 201


@on_one_loop()
async def admin(app: Litestar, tenant_db: AsyncEngine, ada: Tenant) -> AsyncIterator[Any]:
    """Calls with an admin key."""
    async with as_key(app, tenant_db, ada, "admin:*") as made:
        yield made


def as_key(app: Litestar, db: AsyncEngine, owner: Tenant, *scopes: str) -> Any:
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def opened() -> AsyncIterator[httpx.AsyncClient]:
        key = desk_of(app).secret.current
        async with tenant(db, owner.org_id) as conn:
            made = await create_key(
                conn,
                org_id=owner.org_id,
                project_id=owner.project_id,
                name="k",
                scopes=scopes,
                pepper=key.derive(PEPPER_PURPOSE),
                pepper_id=key.id,
                actor=ACTOR,
            )
        async with new_browser(app) as client:
            client.headers["authorization"] = f"Bearer {made.secret}"
            yield client

    return opened()


async def test_an_admin_makes_changes_rotates_and_archives_a_client(
    app: Litestar, admin: httpx.AsyncClient, ada: Tenant
) -> None:
    desk = desk_of(app)
    made = await admin.post(CLIENTS, json={**DOCUMENT, "project_id": ada.project_id})
    assert made.status_code == 201, made.text
    client, tag = made.json(), made.headers["etag"]
    one = f"{CLIENTS}/{client['id']}"
    assert await desk.clients.has_secret(client["id"], client["client_secret"], now=desk.clock())
    read = await admin.get(one)
    assert "client_secret" not in read.json() and read.json()["client_name"] == "Agent"
    tag = read.headers["etag"]
    changed = await admin.post(
        one, json={**DOCUMENT, "client_name": "New"}, headers={"if-match": tag}
    )
    assert changed.status_code == 200 and changed.json()["client_name"] == "New"
    stale = await admin.post(one, json=DOCUMENT, headers={"if-match": tag})
    assert stale.status_code == 412
    rotated = await admin.post(one + "/rotate-secret", json={"grace_s": 60})
    for secret in (client["client_secret"], rotated.json()["client_secret"]):
        assert await desk.clients.has_secret(client["id"], secret, now=desk.clock())
    listed = (await admin.get(CLIENTS)).json()
    assert [each["id"] for each in listed["data"]] == [client["id"]]
    assert (await admin.delete(one, headers={"if-match": tag})).status_code == 412
    gone = await admin.delete(one)
    assert gone.status_code == 200 and gone.json()["archived_at"] is not None
    assert (await admin.get(CLIENTS)).json()["data"] == []
    every = await admin.get(CLIENTS, params={"include_archived": "true"})
    assert len(every.json()["data"]) == 1
    assert await desk.clients.find(client["id"]) is None


async def test_bad_input_is_refused_as_a_problem_that_names_the_field(
    app: Litestar, admin: httpx.AsyncClient, tenant_db: AsyncEngine, ada: Tenant
) -> None:
    for body, param in (
        ({}, "client_name"),
        ({**DOCUMENT, "extra": 1}, "extra"),
        ({**DOCUMENT, "redirect_uris": ["http://client.example"]}, "redirect_uris"),
        ({**DOCUMENT, "scopes": ["no:such"]}, "scopes"),
        ({**DOCUMENT, "grant_types": ["implicit"]}, "grant_types"),
        ({**DOCUMENT, "token_endpoint_auth_method": "x"}, "token_endpoint_auth_method"),
    ):
        refused = await admin.post(CLIENTS, json=body)
        assert refused.status_code == 400, refused.text
        assert refused.headers["content-type"] == "application/problem+json"
        assert refused.json()["param"] == param
    missing = await admin.post(CLIENTS, json={**DOCUMENT, "project_id": "proj_none"})
    assert missing.status_code == 404
    for unknown in (f"{CLIENTS}/client_none", "/v1/admin/oauth/grants/grant_none"):
        assert (await admin.get(unknown)).status_code == 404
    async with as_key(app, tenant_db, ada, "admin:clients") as limited:
        wider = await limited.post(CLIENTS, json={**DOCUMENT, "scopes": ["admin:*"]})
        assert wider.status_code == 403, "nobody makes what may do more than they may"
        assert (await limited.post(CLIENTS, json=DOCUMENT)).status_code == 201
        machine = {
            "client_name": "M",
            "grant_types": ["client_credentials"],
            "scopes": ["inference"],
        }
        assert (await limited.post(CLIENTS, json=machine)).status_code == 201


async def test_a_grant_is_seen_and_ended_and_the_user_asked_again(
    signed_in: httpx.AsyncClient, admin: httpx.AsyncClient, client: Client, ada: Tenant
) -> None:
    shown = await signed_in.get(authorize_url(query_of(client.id)))
    await consent(signed_in, shown)
    grants = "/v1/admin/oauth/grants"
    (grant,) = (await admin.get(grants, params={"user_id": ada.user_id})).json()["data"]
    assert grant["client_id"] == client.id and grant["revoked_at"] is None
    assert (await admin.get(grants, params={"client_id": "client_b"})).json()["data"] == []
    ended = await admin.post(f"{grants}/{grant['id']}/revoke")
    assert ended.status_code == 200 and ended.json()["revoked_because"] == "administration"
    assert (await admin.get(f"{grants}/{grant['id']}")).json() == ended.json()
    again = await admin.post(f"{grants}/{grant['id']}/revoke")
    assert again.json() == ended.json()
    asked = await signed_in.get(authorize_url(query_of(client.id)))
    assert asked.status_code == 200, "the consent went with it"
