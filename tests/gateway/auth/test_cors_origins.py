"""One small table says which organizations list an origin; it is read when browsers ask."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
import sqlalchemy as sa
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from gateway.audit.log import COMMAND_LINE
from gateway.auth.cors_origins import MAX_AGE_S, REFRESH_S, CorsOrigins
from gateway.db import ROLE_SYSTEM, create_engine, tenant
from gateway.tenancy.errors import InvalidField, NotFound
from gateway.tenancy.keys.restrictions import check_origins
from gateway.tenancy.orgs import Org, archive_org, create_org, get_org, update_org
from tests.gateway.auth.bearer.test_api_keys import counted_queries

APP = "https://app.example.com"
NOWHERE = "postgresql+asyncpg://nobody@/none?host=/nonexistent"


async def update_origins(db: AsyncEngine, redis: Redis, org_id: str, origins: Iterable[str]) -> Org:
    values = {"cors_origins": check_origins(origins)}
    return await update_org(db, redis, org_id, values, actor=COMMAND_LINE)


async def make_org(db: AsyncEngine, redis: Redis, name: str, *origins: str) -> str:
    async with db.begin() as conn:
        org = await create_org(conn, name=name, actor=COMMAND_LINE)
    assert org.cors_origins == []
    await update_origins(db, redis, org.id, origins)
    return org.id


async def known(origins: CorsOrigins, origin: str) -> frozenset[str]:
    """Once what is being read has been read."""
    await origins.orgs_of(origin)
    await origins._reads.wait()
    return await origins.orgs_of(origin)


async def test_an_origin_is_of_those_who_list_it(
    db: AsyncEngine, redis: Redis, postgres_url: str
) -> None:
    acme = await make_org(db, redis, "acme", APP, "http://localhost:3000", APP)
    other = await make_org(db, redis, "other", APP)
    await make_org(db, redis, "quiet")
    system = create_engine(postgres_url, role=ROLE_SYSTEM)
    now = [0.0]
    origins = CorsOrigins(system, clock=lambda: now[0])
    with counted_queries(system) as queries:
        asked = await asyncio.gather(*(origins.orgs_of(APP) for _ in range(20)))
        assert set(asked) == {frozenset({acme, other})}
        assert await origins.orgs_of("http://localhost:3000") == {acme}
        for stranger in ("https://app.example.com:8443", "https://example.com", "null", ""):
            assert await origins.orgs_of(stranger) == frozenset()
        assert len(queries) == 1
    await update_origins(db, redis, acme, [])
    assert APP not in await read(db, acme)
    now[0] += REFRESH_S
    assert await known(origins, APP) == {acme, other}, "not asked anew within a second"
    now[0] += 0.1
    assert await origins.orgs_of(APP) == {acme, other}, "nobody waits for the refresh"
    assert await known(origins, APP) == {other}
    await archive_org(db, redis, other, actor=COMMAND_LINE)
    now[0] += MAX_AGE_S + 1
    assert await origins.orgs_of(APP) == frozenset(), "what is old is waited for"
    await origins.close()
    await system.dispose()


async def read(db: AsyncEngine, org_id: str) -> list[str]:
    async with tenant(db, org_id) as conn:
        return (await get_org(conn, org_id)).cors_origins


async def test_without_postgres_what_was_known_stays(
    db: AsyncEngine, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    acme = await make_org(db, redis, "acme", APP)
    now = [0.0]
    origins = CorsOrigins(db, clock=lambda: now[0])
    assert await origins.orgs_of(APP) == {acme}
    nowhere = create_async_engine(NOWHERE)
    origins._db = nowhere
    for _ in range(3):
        now[0] += MAX_AGE_S + 1
        assert await origins.orgs_of(APP) == {acme}
    assert await origins.orgs_of(APP) == {acme}, "asked again a second later, not at once"
    assert caplog.text.count("CORS origins cannot be read") == 3
    await nowhere.dispose()


async def test_closing_ends_the_read_under_way(db: AsyncEngine) -> None:
    origins = CorsOrigins(db)
    async with db.connect() as blocker:
        await blocker.execute(sa.text("LOCK TABLE orgs IN ACCESS EXCLUSIVE MODE"))
        asking = asyncio.create_task(origins.orgs_of(APP))
        async with asyncio.timeout(30):
            while not len(origins._reads):
                await asyncio.sleep(0.005)
        await origins.close()
        with pytest.raises(asyncio.CancelledError):
            await asking
    await origins.close()


@pytest.mark.parametrize(
    "origin",
    [
        *("*", "null", "", "app.example.com", "https://app.example.com/", "https://"),
        *("https://*.example.com", "https://App.example.com", "https://example.com:443"),
        *("http://example.com:80", "https://example.com:65536", "https://u@example.com"),
        *("https://exämple.com", "https://example.com\n", "https://" + "a" * 300),
    ],
)
async def test_what_no_browser_sends_is_refused(db: AsyncEngine, redis: Redis, origin: str) -> None:
    org_id = await make_org(db, redis, "acme", APP)
    with pytest.raises(InvalidField, match=r"^cors_origins: "):
        await update_origins(db, redis, org_id, [origin])
    assert await read(db, org_id) == [APP]


@pytest.mark.parametrize(
    "origin", ["http://[::1]:3000", "http://localhost", "capacitor://localhost", "https://a.b:8443"]
)
async def test_what_browsers_send_is_kept(db: AsyncEngine, redis: Redis, origin: str) -> None:
    org_id = await make_org(db, redis, "acme", origin)
    assert await read(db, org_id) == [origin]


async def test_bounds_and_strangers(db: AsyncEngine, redis: Redis) -> None:
    org_id = await make_org(db, redis, "acme")
    with pytest.raises(InvalidField):
        await update_origins(db, redis, org_id, [f"https://a{n}.example" for n in range(51)])
    for unknown in ("org_none", ""):
        with pytest.raises(NotFound):
            await update_origins(db, redis, unknown, [APP])
        with pytest.raises(NotFound):
            await read(db, unknown)
