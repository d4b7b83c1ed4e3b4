"""A database of somebody else's, whose user may not create roles: one line says what to run, and
after that it is all that is needed."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest
import sqlalchemy as sa

from gateway.db import ROLE_SYSTEM, ROLE_TENANT, create_engine, tenant
from gateway.home import Home
from gateway.processes import embedded_databases as embedded
from migrations.errors import MigrationError
from migrations.runner import migrate
from tests.budget import part_of
from tests.scratch import make_scratch, scratch_for_a_while

USER = "of the shop"
"""Such names must be quoted."""
LINE = 'the Postgres user "of the shop" may not create roles; an administrator has to run, once: '


class Cluster:
    """One of its own: roles belong to the whole of it."""

    def __init__(self, home: Home) -> None:
        self.home = home

    async def administer(self, *statements: str, database: str = "postgres") -> None:
        url = embedded.postgres_url(self.home, database).replace("+asyncpg", "")
        connection = await asyncpg.connect(url)
        try:
            for statement in statements:
                await connection.execute(statement)
        finally:
            await connection.close()

    def url(self, database: str) -> str:
        """As the user who may not."""
        parts = sa.make_url(embedded.postgres_url(self.home, database)).set(username=USER)
        return parts.render_as_string(hide_password=False)

    async def refusal(self, database: str) -> str:
        with pytest.raises(MigrationError) as refused:
            await migrate(self.url(database))
        return str(refused.value)


@pytest.fixture(scope="module")
def blank() -> Iterator[Home]:
    """A home with a new cluster that runs no more."""
    with scratch_for_a_while() as folder:
        home = Home(Path(folder))
        home.create()

        async def make() -> None:
            child = await embedded.start_postgres(home, durable=False)
            await child.stop(embedded.STOP_TIMEOUT_S)

        asyncio.run(make())
        yield home


@pytest.fixture
async def cluster(blank: Home) -> AsyncIterator[Cluster]:
    folder = make_scratch()
    home = Home(folder)
    home.create()
    shutil.copytree(blank.postgres, home.postgres)
    child = await embedded.start_postgres(home, durable=False)
    made = Cluster(home)
    await made.administer(
        f'CREATE ROLE "{USER}" LOGIN',
        f'CREATE DATABASE one OWNER "{USER}"',
        f'CREATE DATABASE two OWNER "{USER}"',
    )
    yield made
    await child.stop(embedded.STOP_TIMEOUT_S)
    shutil.rmtree(folder)


async def roles_work(cluster: Cluster, database: str) -> None:
    for role in (ROLE_TENANT, ROLE_SYSTEM):
        pool = create_engine(cluster.url(database), role=role, pool_size=1)
        async with tenant(pool, "org_x") as conn:
            assert await conn.scalar(sa.text("SELECT current_user")) == role
            assert (await conn.execute(sa.text("SELECT * FROM orgs"))).all() == []
        await pool.dispose()


async def test_what_an_administrator_is_asked_to_run_is_enough(cluster: Cluster) -> None:
    said = await cluster.refusal("one")
    assert said.startswith(LINE) and "\n" not in said
    statements = [f"{each};" for each in said.removeprefix(LINE).split(";") if each.strip()]
    assert [each.split()[:3] for each in statements] == [
        ["CREATE", "ROLE", ROLE_TENANT],
        ["CREATE", "ROLE", ROLE_SYSTEM],
    ]
    await cluster.administer(*statements)
    await migrate(cluster.url("one"))
    await roles_work(cluster, "one")
    await migrate(cluster.url("two"))
    await roles_work(cluster, "two")


async def test_roles_of_somebody_else_are_asked_for_by_grant(cluster: Cluster) -> None:
    await migrate(embedded.postgres_url(cluster.home))
    assert await cluster.refusal("one") == (
        LINE + f'GRANT {ROLE_TENANT} TO "{USER}"; GRANT {ROLE_SYSTEM} TO "{USER}";'
    )
    await cluster.administer(f'GRANT {ROLE_TENANT}, {ROLE_SYSTEM} TO "{USER}"')
    await migrate(cluster.url("one"))
    await roles_work(cluster, "one")


async def test_who_may_create_roles_needs_nobody(cluster: Cluster) -> None:
    await cluster.administer(f'ALTER ROLE "{USER}" CREATEROLE')
    await migrate(cluster.url("one"))
    await migrate(cluster.url("two"))
    await roles_work(cluster, "one")


@pytest.mark.parametrize("power", part_of(["BYPASSRLS", "SUPERUSER", "LOGIN"]))
async def test_a_role_that_would_open_the_wall_is_not_taken(cluster: Cluster, power: str) -> None:
    await cluster.administer(f"CREATE ROLE {ROLE_TENANT} {power}")
    assert await cluster.refusal("one") == (
        f"the Postgres role {ROLE_TENANT} must not log in or bypass row security"
    )
