"""Clients: made, found, changed, archived, each inside its org."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.auth.oauth.clients.metadata import from_document
from gateway.auth.oauth.clients.store import (
    MAX_GRACE_S,
    Client,
    Clients,
    CreatedClient,
    archive_client,
    archive_registered,
    create_client,
    from_metadata,
    get_client,
    rotate_secret,
    select_clients,
    update_client,
)
from gateway.auth.tables import oauth_clients
from gateway.db import tenant
from gateway.secret import Peppers
from gateway.tenancy.errors import InvalidField, NotFound
from gateway.tenancy.orgs import find_operator
from gateway.tenancy.tables import orgs, projects
from tests.gateway.auth.conftest import ACTOR, SECRET, Clock, Tenant

PEPPERS = Peppers(SECRET, "oauth-client-secret")
METADATA = from_document({"client_name": "App", "redirect_uris": ["https://client.example/cb"]})
PUBLIC = from_document(
    {"redirect_uris": ["https://client.example/cb"], "token_endpoint_auth_method": "none"}
)


async def make(conn: AsyncConnection, org_id: str | None, **more: Any) -> CreatedClient:
    options = {"metadata": METADATA, "scopes": ["inference"], "actor": ACTOR, **more}
    return await create_client(conn, PEPPERS, org_id=org_id, **options)


async def listed(conn: AsyncConnection, org_id: str, *, archived: bool = False) -> list[Client]:
    statement = select_clients(org_id, archived=archived).order_by(oauth_clients.c.id)
    return [Client(**row._mapping) for row in await conn.execute(statement)]


@pytest.fixture
def clients(system_db: AsyncEngine) -> Clients:
    return Clients(db=system_db, peppers=PEPPERS)


async def test_a_client_is_found_with_its_secret_which_stands_nowhere(
    db: AsyncEngine, tenant_db: AsyncEngine, acme: Tenant, clients: Clients, clock: Clock
) -> None:
    async with tenant(tenant_db, acme.org_id) as conn:
        made = await make(conn, acme.org_id, project_id=acme.project_id)
    assert made.client_secret is not None and made.registration_access_token is None
    assert repr(made) == f"CreatedClient({made.client.id})"
    assert made.client.confidential and not made.client.native
    assert await clients.find(made.client.id) == made.client
    assert await clients.has_secret(made.client.id, made.client_secret, now=clock.now)
    assert not await clients.has_secret(made.client.id, made.client_secret + "x", now=clock.now)
    assert not await clients.has_secret("client_none", made.client_secret, now=clock.now)
    assert not await clients.has_secret(made.client.id, "x" * 5000, now=clock.now)
    assert not await clients.has_secret("\0", made.client_secret, now=clock.now)
    async with db.connect() as conn:
        rows = (await conn.execute(sa.select(oauth_clients))).all()
    assert made.client_secret not in str(rows)


async def test_a_public_client_has_no_secret(
    tenant_db: AsyncEngine, acme: Tenant, clients: Clients, clock: Clock
) -> None:
    async with tenant(tenant_db, acme.org_id) as conn:
        made = await make(conn, acme.org_id, metadata=PUBLIC)
        assert made.client_secret is None and not made.client.confidential
        with pytest.raises(InvalidField):
            await rotate_secret(
                conn,
                PEPPERS,
                org_id=acme.org_id,
                client_id=made.client.id,
                grace_s=0,
                actor=ACTOR,
                now=clock.now,
            )
    assert not await clients.has_secret(made.client.id, "", now=clock.now)


async def test_its_owners_are_of_its_org(
    tenant_db: AsyncEngine, acme: Tenant, other: Tenant
) -> None:
    async with tenant(tenant_db, acme.org_id) as conn:
        for owner in (
            {"project_id": other.project_id},
            {"service_account_id": "svc_acct_x"},
            {"plan": "none"},
        ):
            with pytest.raises(NotFound) as refused:
                await make(conn, acme.org_id, **owner)
            assert {refused.value.param} == owner.keys()


async def test_a_rotated_secret_works_on_for_its_grace(
    tenant_db: AsyncEngine, acme: Tenant, clients: Clients, clock: Clock
) -> None:
    async def rotate(grace_s: int) -> str:
        async with tenant(tenant_db, acme.org_id) as conn:
            done = await rotate_secret(
                conn,
                PEPPERS,
                org_id=acme.org_id,
                client_id=made.client.id,
                grace_s=grace_s,
                actor=ACTOR,
                now=clock.now,
            )
        assert done.client_secret is not None
        return done.client_secret

    async with tenant(tenant_db, acme.org_id) as conn:
        made = await make(conn, acme.org_id)
    first = made.client_secret or ""
    second = await rotate(60)
    assert await clients.has_secret(made.client.id, first, now=clock.now)
    assert await clients.has_secret(made.client.id, second, now=clock.now)
    clock.pass_s(60)
    assert not await clients.has_secret(made.client.id, first, now=clock.now)
    assert await clients.has_secret(made.client.id, second, now=clock.now)
    await rotate(0)
    assert not await clients.has_secret(made.client.id, second, now=clock.now)
    with pytest.raises(InvalidField):
        await rotate(MAX_GRACE_S + 1)


async def test_what_is_archived_is_nobodys(
    db: AsyncEngine, tenant_db: AsyncEngine, acme: Tenant, clients: Clients
) -> None:
    async with tenant(tenant_db, acme.org_id) as conn:
        made = [await make(conn, acme.org_id, project_id=acme.project_id) for _ in range(2)]
        gone = await archive_client(
            conn, org_id=acme.org_id, client_id=made[0].client.id, actor=ACTOR
        )
        assert gone.archived_at is not None
        again = await archive_client(
            conn, org_id=acme.org_id, client_id=made[0].client.id, actor=ACTOR
        )
        assert again == gone
        assert await listed(conn, acme.org_id) == [made[1].client]
        every = await listed(conn, acme.org_id, archived=True)
        assert [each.id for each in every] == [each.client.id for each in made]
    assert await clients.find(made[0].client.id) is None
    assert await clients.find(made[1].client.id) is not None
    for table in (projects, orgs):
        async with db.begin() as conn:
            await conn.execute(sa.update(table).values(archived_at=sa.func.now()))
        assert await clients.find(made[1].client.id) is None
        async with db.begin() as conn:
            await conn.execute(sa.update(table).values(archived_at=None))


async def test_a_client_is_changed_but_not_into_another(
    tenant_db: AsyncEngine, acme: Tenant
) -> None:
    async with tenant(tenant_db, acme.org_id) as conn:
        made = await make(conn, acme.org_id)
        changed = from_document(
            {"client_name": "New", "redirect_uris": ["http://localhost/cb"], "scope": "openid"}
        )
        options: dict[str, Any] = {
            "org_id": acme.org_id,
            "client_id": made.client.id,
            "scopes": ["openid"],
            "actor": ACTOR,
            "service_account_id": None,
        }
        after = await update_client(conn, metadata=changed, project_id=acme.project_id, **options)
        assert (after.name, after.version, after.native) == ("New", 2, True)
        with pytest.raises(NotFound) as refused:
            await update_client(conn, metadata=changed, project_id=None, plan="none", **options)
        assert refused.value.param == "plan"
        assert after.project_id == acme.project_id and after.scopes == ["openid"]
        assert await get_client(conn, org_id=acme.org_id, client_id=made.client.id) == after
        with pytest.raises(InvalidField):
            await update_client(conn, metadata=PUBLIC, project_id=None, **options)
        with pytest.raises(NotFound):
            unknown = {**options, "client_id": "client_none"}
            await update_client(conn, metadata=changed, project_id=None, **unknown)


async def test_another_tenant_sees_and_changes_nothing(
    tenant_db: AsyncEngine, acme: Tenant, other: Tenant
) -> None:
    async with tenant(tenant_db, acme.org_id) as conn:
        made = await make(conn, acme.org_id)
    async with tenant(tenant_db, other.org_id) as conn:
        assert await listed(conn, acme.org_id) == []
        for org_id in (acme.org_id, other.org_id):
            with pytest.raises(NotFound):
                await get_client(conn, org_id=org_id, client_id=made.client.id)
            with pytest.raises(NotFound):
                await archive_client(conn, org_id=org_id, client_id=made.client.id, actor=ACTOR)


async def test_a_client_that_registers_itself_has_no_org_and_a_token(
    system_db: AsyncEngine, tenant_db: AsyncEngine, acme: Tenant, clients: Clients, db: AsyncEngine
) -> None:
    async with system_db.begin() as conn:
        assert await find_operator(conn) is None
        unheard = await make(conn, None)
    async with db.begin() as conn:
        await conn.execute(sa.update(orgs).values(is_operator=True))
    async with system_db.begin() as conn:
        assert await find_operator(conn) == acme.org_id
        made = await make(conn, None, audit_org=acme.org_id)
    token = made.registration_access_token or ""
    assert made.client.source == "dynamic" and made.client.org_id is None
    assert await clients.find_registered(made.client.id, token) == made.client
    assert await clients.find_registered(made.client.id, token + "x") is None
    assert await clients.find_registered(unheard.client.id, token) is None
    async with tenant(tenant_db, acme.org_id) as conn:
        assert await listed(conn, acme.org_id) == []
    async with system_db.begin() as conn:
        await archive_registered(conn, made.client, actor=ACTOR, audit_org=acme.org_id)
        await archive_registered(conn, unheard.client, actor=ACTOR, audit_org=None)
    assert await clients.find(made.client.id) is None
    assert await clients.find_registered(made.client.id, token) is None


async def test_a_url_is_the_id_of_what_stands_there(system_db: AsyncEngine) -> None:
    url = "https://client.example/id"
    described = from_metadata(url, METADATA, ["inference"])

    async def fetch(asked: str) -> Client | None:
        return described if asked == url else None

    with_documents = Clients(db=system_db, peppers=PEPPERS, fetch=fetch)
    assert await with_documents.find(url) == described
    assert described.source == "document" and described.org_id is None
    assert await with_documents.find(url + "x") is None
    assert await Clients(db=system_db, peppers=PEPPERS).find(url) is None
    assert await with_documents.find("x" * 3000) is None
    assert await with_documents.find("client_\0") is None
