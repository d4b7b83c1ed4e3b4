"""The oldest Postgres that is supported: the same schema, the same books, the same walls as on the
newest. `make test-postgres` runs more of the suite on it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.ingestion.ingest import ingest
from billing.reconciliation.checks import check_ledger
from gateway.db import ROLE_TENANT, create_engine, tenant
from gateway.home import Home
from gateway.processes import embedded_databases as embedded
from migrations import runner
from migrations.runner import MigrationError, migrate
from tests.billing.samples import an_attempt, an_event
from tests.gateway.walls.two_tenants import ALICE, MALLORY, populate
from tests.postgres_majors import NEWEST, OLDEST, WANTED, use_oldest
from tests.scratch import make_scratch
from tests.upgrade.schema import schema_of

pytestmark = pytest.mark.skipif(WANTED != NEWEST, reason="the whole run is on the oldest")


@pytest.fixture(scope="module")
def old_cluster() -> Iterator[Home]:
    """Run a cluster of the oldest Postgres with the newest schema."""
    folder = make_scratch()
    home = Home(folder)
    home.create()
    with pytest.MonkeyPatch.context() as patch:
        use_oldest(patch)
        child = asyncio.run(embedded.start_postgres(home, durable=False))
    asyncio.run(migrate(embedded.postgres_url(home)))
    yield home
    asyncio.run(child.stop(embedded.STOP_TIMEOUT_S))
    shutil.rmtree(folder)


@pytest.fixture
async def on_oldest(old_cluster: Home) -> AsyncIterator[AsyncEngine]:
    """A pool on it."""
    engine = create_engine(embedded.postgres_url(old_cluster))
    yield engine
    await engine.dispose()


async def version(connection: AsyncConnection) -> str:
    return str(await connection.scalar(sa.text("SHOW server_version_num")))[:2]


async def test_both_have_the_same_schema(
    old_cluster: Home, on_oldest: AsyncEngine, db: AsyncEngine, postgres_url: str
) -> None:
    async with on_oldest.connect() as old, db.connect() as new:
        assert (await version(old), await version(new)) == (OLDEST, NEWEST)
    assert await schema_of(embedded.postgres_url(old_cluster)) == await schema_of(postgres_url)


async def test_usage_is_booked_once_and_the_books_balance(on_oldest: AsyncEngine) -> None:
    event = an_event(an_attempt())
    for _ in range(2):
        await ingest(on_oldest, [event])
    async with on_oldest.connect() as connection:
        assert await connection.scalar(sa.text("SELECT count(*) FROM usage_events")) == 1
    assert await check_ledger(on_oldest) == []


async def test_a_tenant_sees_its_own_rows_alone(old_cluster: Home, on_oldest: AsyncEngine) -> None:
    async with on_oldest.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        await connection.execute(sa.text("CREATE DATABASE walls"))
    url = embedded.postgres_url(old_cluster, "walls")
    await migrate(url)
    owner, pool = create_engine(url), create_engine(url, role=ROLE_TENANT)
    columns = await populate(owner)
    for org in (ALICE, MALLORY):
        async with tenant(pool, org) as connection:
            for table, column in columns.items():
                found = await connection.scalars(sa.text(f"SELECT {column} FROM {table}"))
                assert set(found) == {org}, table
    await owner.dispose()
    await pool.dispose()


async def test_an_older_one_is_refused(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "POSTGRES_MAJORS", (int(NEWEST) + 1, int(NEWEST) + 2))
    with pytest.raises(MigrationError, match=f"this is Postgres {NEWEST}: Tollgate needs"):
        await migrate(postgres_url)


async def test_data_of_another_major_is_refused_with_what_to_do(old_cluster: Home) -> None:
    with pytest.raises(embedded.EmbeddedError, match=rf"made by Postgres {OLDEST}.*pg_dump"):
        await embedded.start_postgres(old_cluster)
