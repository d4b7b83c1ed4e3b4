"""The arguments of a call that waits are for who decides in its org, sealed, while it waits."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.mcp.approvals import PostgresApprovals
from gateway.mcp.call_arguments import CallArguments, forget_late
from gateway.mcp.tables import approvals as table
from mcp_bridge.trust.approvals import ApprovalTransition, decided, requested, used
from tests.gateway.a_secret import a_secret
from tests.gateway.mcp.test_stores import asked

ARGUMENTS = b'{"iban":"DE00 1234"}'
NOW_S, LATE_S = 110.0, 160.0


def store_of(tenant_db: AsyncEngine, *names: str) -> PostgresApprovals:
    return PostgresApprovals(tenant_db, shown=CallArguments(a_secret(*names)))


async def insert(store: PostgresApprovals, new: ApprovalTransition) -> None:
    org_id = new.approval.call.org_id
    assert await store.insert(org_id, new, max_pending=9, arguments=ARGUMENTS)


async def test_who_decides_sees_them_and_nobody_else(
    db: AsyncEngine, tenant_db: AsyncEngine, orgs: list[str]
) -> None:
    alice, mallory = orgs
    store = store_of(tenant_db, "k1")
    await insert(store, asked(alice, "one"))
    assert await store.arguments(alice, "one", NOW_S) == ARGUMENTS
    assert await store.arguments(mallory, "one", NOW_S) is None
    assert await store.arguments(alice, "two", NOW_S) is None
    assert await PostgresApprovals(tenant_db).arguments(alice, "one", NOW_S) is None
    async with db.connect() as conn:
        rows = str((await conn.execute(sa.select(table))).all())
    assert "iban" not in rows and "1234" not in rows
    assert await store_of(tenant_db, "k2", "k1").arguments(alice, "one", NOW_S) == ARGUMENTS
    assert await store_of(tenant_db, "k2").arguments(alice, "one", NOW_S) is None, "its key is gone"


async def test_they_open_with_their_own_call_alone(
    db: AsyncEngine, tenant_db: AsyncEngine, orgs: list[str]
) -> None:
    """Nobody who writes to the table can show harmless arguments instead."""
    store = store_of(tenant_db, "k1")
    await insert(store, asked(orgs[0], "one"))
    await insert(store, asked(orgs[0], "two", "sha256:2"))
    swap = sa.text("""
        UPDATE mcp_approvals a SET arguments = b.arguments FROM mcp_approvals b
        WHERE a.id = 'one' AND b.id = 'two'
    """)
    async with db.begin() as conn:
        await conn.execute(swap)
    assert await store.arguments(orgs[0], "one", NOW_S) is None
    assert await store.arguments(orgs[0], "two", NOW_S) == ARGUMENTS
    exchange = sa.text("UPDATE mcp_approvals SET body = replace(body, 'sha256:2', 'sha256:3')")
    async with db.begin() as conn:
        await conn.execute(exchange)
    assert await store.arguments(orgs[0], "two", NOW_S) is None


async def kept(db: AsyncEngine) -> set[str]:
    filled = sa.or_(table.c.arguments.is_not(None), table.c.secret_id.is_not(None))
    async with db.connect() as conn:
        return set(await conn.scalars(sa.select(table.c.id).where(filled)))


@pytest.mark.parametrize("yes", [True, False])
async def test_they_are_gone_once_it_is_decided(
    db: AsyncEngine, tenant_db: AsyncEngine, orgs: list[str], yes: bool
) -> None:
    store, new = store_of(tenant_db, "k1"), asked(orgs[0], "one")
    await insert(store, new)
    answer = decided(new.approval, approve=yes, by="bob", now_s=NOW_S)
    assert isinstance(answer, ApprovalTransition)
    assert await store.replace(orgs[0], new.approval, answer)
    assert await kept(db) == set()
    if yes:
        call = new.approval.call
        spent = used(answer.approval, call, nonce="n", call_id="c", now_s=NOW_S)
        assert isinstance(spent, ApprovalTransition) and await store.replace(
            orgs[0], answer.approval, spent
        )


async def test_nobody_sees_what_nobody_decided_in_time(
    db: AsyncEngine, tenant_db: AsyncEngine, orgs: list[str]
) -> None:
    store = store_of(tenant_db, "k1")
    for org_id in orgs:
        await insert(store, asked(org_id, f"late {org_id}"))
    call = asked(orgs[0], "x", "sha256:2").approval.call
    await insert(store, requested(call, approval_id="new", nonce="n", now_s=NOW_S, ttl_s=60))
    late = f"late {orgs[0]}"
    assert await store.arguments(orgs[0], late, LATE_S - 1) == ARGUMENTS
    assert await store.arguments(orgs[0], late, LATE_S) is None
    assert await forget_late(db, LATE_S - 1) == 0 and len(await kept(db)) == 3
    assert await forget_late(db, LATE_S) == 2 and await kept(db) == {"new"}
    assert await store.arguments(orgs[0], "new", LATE_S) == ARGUMENTS
