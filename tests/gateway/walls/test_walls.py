"""The second wall, read from the catalog: every table has row security or says here why not, and
what a tenant's transaction can reach is its own rows, without any WHERE.

A new table comes into `READABLE` or `HIDDEN` with the reason, or, as nearly all, behind the wall
(`migrations.walls.protect`), and then it needs nothing here.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, ProgrammingError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.app.create import open_services
from gateway.db import ROLE_SYSTEM, ROLE_TENANT, create_engine, tenant
from gateway.home import Home
from gateway.secret import Secret
from gateway.settings.load import load
from tests.gateway.walls.two_tenants import (
    ALICE,
    COLUMNS,
    MALLORY,
    POLICIES,
    TENANT_POLICY,
    org_columns,
    partitions,
    populate,
    relations,
)

READABLE = {
    "fx_rates": "what a currency was worth is the same for all",
    "plans": "named limits out of the settings, the same for all",
}
HIDDEN = {
    "alembic_version": "the owner's own: which migrations ran",
    "price_keys": "what one tenant has agreed upon is no other's business",
    "price_rules": "what one tenant has agreed upon is no other's business",
    "price_sets": "what one tenant has agreed upon is no other's business",
    "prices": "what one tenant has agreed upon is no other's business",
    "accounts": "the books of the house speak of all tenants",
    "balances": "the books of the house speak of all tenants",
    "entries": "the books of the house speak of all tenants",
    "cell_demands": "what each cell was asked for, of the limits of all tenants",
    "cell_shares": "which share of the limits of all tenants each cell has",
    "installation_generation": "how often the settings of the installation were changed",
    "installation_homes": "where the settings of the installation are in force",
    "installation_items": "models and servers of the installation, some for few tenants",
    "invoice_counters": "the last number of an issuer, who bills all tenants",
    "model_evaluations": "what was said of the installation's versions, in the operator's words",
    "model_pins": "who gets which version of a model is the operator's to say",
    "model_rollout_counts": "how requests of all tenants ended, counted together",
    "model_rollouts": "which share of tenants gets a version is the operator's to say",
    "model_versions": "the versions of models are the installation's",
    "oauth_assertions": "which assertions were shown once, before it is known by whom",
    "reconciliations": "whether the books of the house agree",
    "schema_support": "the owner's own: which releases the schema serves",
    "signing_keys": "the installation signs for all tenants",
    "transfers": "the books of the house speak of all tenants",
    "usage_conflicts": "what a person must look at, of whichever tenant",
}
NOBODYS = {"oauth_clients": "a client that registered itself is no tenant's, and none sees it"}
"""Tables whose rows may name no org: then they are behind the wall of all."""
ROLES = (ROLE_TENANT, ROLE_SYSTEM)
FORBIDDEN = "42501"
"""Postgres: insufficient_privilege, which is also what row security says."""


@pytest.fixture
async def as_tenant(postgres_url: str) -> AsyncIterator[AsyncEngine]:
    """One connection, so that it is reused."""
    pool = create_engine(postgres_url, role=ROLE_TENANT, pool_size=1)
    yield pool
    await pool.dispose()


@pytest.fixture
async def as_system(postgres_url: str) -> AsyncIterator[AsyncEngine]:
    pool = create_engine(postgres_url, role=ROLE_SYSTEM, pool_size=1)
    yield pool
    await pool.dispose()


@pytest.fixture
async def columns(db: AsyncEngine) -> dict[str, str]:
    return await populate(db)


def is_forbidden(error: DBAPIError) -> bool:
    return getattr(error.orig, "sqlstate", None) == FORBIDDEN


async def everything(conn: AsyncConnection, table: str, column: str = "*") -> list[object] | None:
    """Without a WHERE; None: that is forbidden."""
    try:
        async with conn.begin_nested():
            return list(await conn.scalars(sa.text(f"SELECT {column} FROM {table}")))
    except ProgrammingError as error:
        if not is_forbidden(error):
            raise
        return None


async def is_refused(conn: AsyncConnection, statement: str) -> bool:
    """Forbidden, or without any effect."""
    try:
        async with conn.begin_nested():
            return (await conn.execute(sa.text(statement))).rowcount == 0
    except ProgrammingError as error:
        if not is_forbidden(error):
            raise
        return True


async def test_every_table_has_row_security_or_says_why_not(db: AsyncEngine) -> None:
    async with db.connect() as conn:
        found = await relations(conn)
        policies = list(await conn.execute(POLICIES))
    names = {each.name for each in found}
    assert {*READABLE, *HIDDEN} <= names, "no longer there: drop it from the list"
    assert READABLE.keys().isdisjoint(HIDDEN)
    walled = {each.name for each in found if each.row_security}
    assert walled == names - {*READABLE, *HIDDEN}
    kinds = {each.name: each.kind for each in found}
    assert {kinds[name] for name in walled} == {"r", "p"}
    for table in walled:
        ours = {policy.name: policy for policy in policies if policy.table == table}
        assert set(ours) == {f"{table}_tenant", f"{table}_system"}, table
        mine, all_ = ours[f"{table}_tenant"], ours[f"{table}_system"]
        assert (mine.roles, mine.cmd, mine.permissive) == ([ROLE_TENANT], "ALL", "PERMISSIVE")
        assert TENANT_POLICY.fullmatch(mine.qual) and mine.with_check == mine.qual, table
        assert (all_.roles, all_.qual, all_.with_check) == ([ROLE_SYSTEM], "true", "true")


async def test_a_partition_is_reached_through_its_table_alone(
    db: AsyncEngine, as_tenant: AsyncEngine, as_system: AsyncEngine
) -> None:
    async with db.connect() as conn:
        found = await partitions(conn)
    assert found and all(each.row_security for each in found)
    for pool in (as_tenant, as_system):
        async with pool.begin() as conn:
            for each in found:
                assert await everything(conn, each.name) is None, each.name


async def test_every_row_says_whose_it_is(db: AsyncEngine) -> None:
    async with db.connect() as conn:
        for table, column in (await org_columns(conn)).items():
            nullable = await conn.scalar(
                sa.text("""
                    SELECT NOT attnotnull FROM pg_attribute
                    WHERE attrelid = CAST(:table AS text)::regclass AND attname = :column
                """),
                {"table": table, "column": column},
            )
            assert nullable is (table in NOBODYS), f"{table}.{column}"


async def test_the_roles_own_nothing_and_bypass_nothing(db: AsyncEngine) -> None:
    async with db.connect() as conn:
        roles = await conn.execute(
            sa.text("""
                SELECT rolname, rolsuper, rolbypassrls, rolcanlogin, rolcreaterole, rolcreatedb,
                    rolreplication, (SELECT count(*) FROM pg_shdepend
                        WHERE refobjid = pg_roles.oid AND deptype = 'o') AS owned,
                    (SELECT count(*) FROM pg_auth_members WHERE member = pg_roles.oid) AS joined,
                    has_schema_privilege(oid, 'public', 'CREATE') AS creates
                FROM pg_roles WHERE rolname = ANY(:roles)
            """),
            {"roles": list(ROLES)},
        )
        powers = {name: list(rest) for name, *rest in roles}
    assert powers == {role: [False] * 6 + [0, 0, False] for role in ROLES}


async def test_no_role_may_empty_a_table_or_hang_a_trigger_on_it(db: AsyncEngine) -> None:
    async with db.connect() as conn:
        granted = await conn.execute(
            sa.text("""
                SELECT role, relname, privilege
                FROM pg_class, unnest(CAST(:roles AS text[])) AS role,
                    unnest(ARRAY['TRUNCATE', 'REFERENCES', 'TRIGGER']) AS privilege
                WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', 'v', 'm', 'f')
                    AND has_table_privilege(role, pg_class.oid, privilege)
            """),
            {"roles": list(ROLES)},
        )
        assert granted.all() == []


async def test_no_function_or_view_lends_its_owners_eyes(db: AsyncEngine) -> None:
    async with db.connect() as conn:
        lending = await conn.scalars(
            sa.text("""
                SELECT proname FROM pg_proc
                WHERE pronamespace = 'public'::regnamespace AND prosecdef
                    AND has_function_privilege(:role, oid, 'EXECUTE')
                UNION ALL
                SELECT relname FROM pg_class
                WHERE relnamespace = 'public'::regnamespace AND relkind IN ('v', 'm')
                    AND has_table_privilege(:role, oid, 'SELECT')
            """),
            {"role": ROLE_TENANT},
        )
        assert lending.all() == []


async def test_a_select_without_where_gives_nothing_or_ones_own(
    as_tenant: AsyncEngine, as_system: AsyncEngine, columns: dict[str, str]
) -> None:
    async with as_tenant.begin() as conn:
        names = [each.name for each in await relations(conn)]
        assert {table for table in names if await everything(conn, table) is None} == set(HIDDEN)
        for table, column in columns.items():
            assert await everything(conn, table, column) == [], table
        await conn.execute(sa.text("SELECT set_config('tollgate.org', '', true)"))
        for table, column in columns.items():
            assert await everything(conn, table, column) == [], table
    for org in (ALICE, MALLORY):
        async with tenant(as_tenant, org) as conn:
            for table, column in columns.items():
                assert await everything(conn, table, column) == [org], table
    async with tenant(as_tenant, "org_nobody") as conn:
        for table, column in columns.items():
            assert await everything(conn, table, column) == [], table
    async with as_system.begin() as conn:
        for table, column in columns.items():
            assert set(await everything(conn, table, column) or ()) == {ALICE, MALLORY}, table


async def test_nothing_is_written_for_or_to_another_tenant(
    db: AsyncEngine, as_tenant: AsyncEngine, columns: dict[str, str]
) -> None:
    async with db.begin() as conn:
        written: dict[str, list[str]] = {}
        for each in await conn.execute(COLUMNS):
            written.setdefault(each.table, []).append(each.name)
        for table in columns:
            copy = (
                f"CREATE TABLE copy_of_{table} AS SELECT {', '.join(written[table])} FROM {table}"
            )
            await conn.execute(sa.text(copy))
            await conn.execute(sa.text(f"GRANT SELECT ON copy_of_{table} TO {ROLE_TENANT}"))
    for org in (MALLORY, ""):
        async with tenant(as_tenant, org) as conn:
            for table, column in columns.items():
                of_alice = f"WHERE {column} = '{ALICE}'"
                names = ", ".join(written[table])
                for write in (
                    f"INSERT INTO {table} ({names}) SELECT {names} FROM copy_of_{table} {of_alice}",
                    f"UPDATE {table} SET {column} = '{MALLORY}' {of_alice}",
                    f"UPDATE {table} SET {column} = '{ALICE}'",
                    f"DELETE FROM {table} {of_alice}",
                ):
                    assert await is_refused(conn, write), write
    async with db.connect() as conn:
        for table in columns:
            names = ", ".join(f"{name}::text" for name in written[table])
            for one, other in ((table, f"copy_of_{table}"), (f"copy_of_{table}", table)):
                query = f"SELECT {names} FROM {one} EXCEPT SELECT {names} FROM {other}"
                assert (await conn.execute(sa.text(query))).all() == [], table


async def test_a_tenant_writes_its_own_rows_but_not_what_it_is(
    as_tenant: AsyncEngine, columns: dict[str, str]
) -> None:
    async with tenant(as_tenant, MALLORY) as conn:
        for own in (
            "UPDATE projects SET name = 'mine'",
            "UPDATE api_keys SET revoked_at = now()",
            "UPDATE orgs SET name = 'mine'",
            "SELECT FROM orgs FOR SHARE",
        ):
            assert (await conn.execute(sa.text(own))).rowcount == 1, own
        for promotion in (
            "UPDATE orgs SET is_operator = true",
            "UPDATE orgs SET plan = NULL",
            f"INSERT INTO orgs (id, name) VALUES ('{MALLORY}', 'again')",
            "UPDATE usage_events SET output = 0",
            "UPDATE usage_hourly SET output = 0",
            "UPDATE plans SET requests_per_minute = NULL",
            "UPDATE prices SET pico_per_token = 0",
        ):
            assert await is_refused(conn, promotion), promotion


async def seen(conn: AsyncConnection) -> list[object]:
    return list(await conn.scalars(sa.text("SELECT id FROM orgs")))


async def pid_of(conn: AsyncConnection) -> object:
    return await conn.scalar(sa.text("SELECT pg_backend_pid()"))


class Left(Exception):
    pass


@pytest.mark.parametrize("end", ["commit", "raise", "error", "cancel", "savepoint"])
async def test_a_reused_connection_carries_no_tenant_over(
    as_tenant: AsyncEngine, columns: dict[str, str], end: str
) -> None:
    pids = []

    async def visit() -> None:
        async with tenant(as_tenant, ALICE) as conn:
            pids.append(await pid_of(conn))
            assert await seen(conn) == [ALICE]
            if end == "raise":
                raise Left
            if end == "error":
                await conn.execute(sa.text("SELECT 1 / 0"))
            if end == "cancel":
                await conn.execute(sa.text("SELECT pg_sleep(60)"))
            if end == "savepoint":
                async with conn.begin_nested():
                    await conn.execute(
                        sa.text("SELECT set_config('tollgate.org', :org, true)"), {"org": MALLORY}
                    )
                    raise Left

    visiting = asyncio.create_task(visit())
    if end == "cancel":
        async with asyncio.timeout(30):
            while not pids:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        visiting.cancel()
    with suppress(Left, DBAPIError, asyncio.CancelledError):
        await visiting
    async with as_tenant.connect() as conn:
        assert await seen(conn) == []
        if end != "cancel":
            assert [await pid_of(conn)] == pids, "not the same connection: nothing was tried"
    async with tenant(as_tenant, MALLORY) as conn:
        assert await seen(conn) == [MALLORY]


async def test_a_connection_that_died_carries_no_tenant_over(
    db: AsyncEngine, as_tenant: AsyncEngine, columns: dict[str, str]
) -> None:
    with pytest.raises((DBAPIError, OSError)):
        async with tenant(as_tenant, ALICE) as conn:
            pid = await pid_of(conn)
            async with db.connect() as killer:
                await killer.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
            await seen(conn)
    async with as_tenant.connect() as conn:
        assert await seen(conn) == [] and await pid_of(conn) != pid
        assert await conn.scalar(sa.text("SELECT current_user")) == ROLE_TENANT


async def test_tenants_at_once_each_see_their_own(
    as_tenant: AsyncEngine, columns: dict[str, str]
) -> None:
    async def visit(org: str) -> None:
        async with tenant(as_tenant, org) as conn:
            for _ in range(5):
                assert await seen(conn) == [org]

    await asyncio.gather(*(visit(org) for org in (ALICE, MALLORY) * 20))


async def test_a_worker_takes_both_roles(postgres_url: str, redis_url: str, tmp_path: Path) -> None:
    config = tmp_path / "t.toml"
    config.write_text('[[model]]\nname = "b"\nupstream = "http://127.0.0.1:1/v1"')
    environ = {"TOLLGATE_DATABASE_URL": postgres_url, "TOLLGATE_REDIS_URL": redis_url}
    settings = load({"home": tmp_path / "home", "config": config}, environ)
    Home(settings.home).create()
    Secret.load_or_create(settings.secret_key_file)
    async with AsyncExitStack() as stack:
        services = await open_services(settings, stack, worker_id="0", metrics=None)
        for pool, role in ((services.db, ROLE_TENANT), (services.system_db, ROLE_SYSTEM)):
            async with pool.connect() as conn:
                assert await conn.scalar(sa.text("SELECT current_user")) == role


def test_one_place_names_the_tenant_and_nobody_changes_role() -> None:
    """A tenant that outlives its transaction, or a role taken in passing, would be a door."""
    root = Path(__file__).parents[3]
    naming = {
        str(path.relative_to(root))
        for room in ("gateway", "billing")
        for path in (root / room).rglob("*.py")
        if re.search(r"tollgate\.org'|set_config|\bSET (LOCAL |SESSION )?ROLE\b", path.read_text())
    }
    assert naming == {"gateway/db.py"}
