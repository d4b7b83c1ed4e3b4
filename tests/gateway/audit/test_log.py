"""Adding to the audit log: in order, in the change's transaction, without a secret, for ever."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.chain import GENESIS, AuditEntry, canonical, digest
from gateway.audit.errors import SecretInAudit
from gateway.audit.log import (
    COMMAND_LINE,
    Actor,
    AuditRecord,
    record,
    record_all,
    record_for_both,
    refuse_secrets,
)
from gateway.audit.tables import entries, heads
from gateway.db import ROLE_SYSTEM, ROLE_TENANT, create_engine, tenant
from gateway.tenancy.tables import orgs

ALICE = Actor(kind="user", id="user_alice", ip="192.0.2.1", request_id="req_1")


async def an_org(db: AsyncEngine, name: str = "acme") -> str:
    async with db.begin() as conn:
        await conn.execute(sa.insert(orgs).values(id=f"org_{name}", name=name))
    return f"org_{name}"


async def all_entries(db: AsyncEngine, org_id: str) -> list[Any]:
    async with db.connect() as conn:
        listed = sa.select(entries).where(entries.c.org_id == org_id)
        return list(await conn.execute(listed.order_by(entries.c.sequence)))


async def test_an_entry_says_who_what_when_from_where_before_and_after(db: AsyncEngine) -> None:
    org_id = await an_org(db)
    started = datetime.now(tz=UTC)
    async with db.begin() as conn:
        await record(
            conn,
            org_id=org_id,
            actor=ALICE,
            action="project.updated",
            target="proj_1",
            before={"name": "old", "at": started},
            after={"name": "new\0", "scopes": {"b", "a"}},
        )
    (row,) = await all_entries(db, org_id)
    assert (row.actor_kind, row.actor_id, row.ip, row.request_id) == (
        "user",
        "user_alice",
        "192.0.2.1",
        "req_1",
    )
    assert (row.action, row.target, row.project_id) == ("project.updated", "proj_1", "proj_1")
    assert row.after == r'{"name":"new\u0000","scopes":["a","b"]}'
    assert '"name":"old"' in row.before
    assert started <= row.occurred_at <= datetime.now(tz=UTC)
    assert row.sequence == 1 and row.previous == GENESIS
    fields = dict(row._mapping)
    assert fields.pop("hash") == digest(AuditEntry(**fields))


async def test_the_project_is_taken_from_what_changed(db: AsyncEngine) -> None:
    org_id = await an_org(db)
    calls: list[dict[str, Any]] = [
        {"target": "key_1", "after": {"project_id": "proj_2"}},
        {"target": "key_1", "before": {"project_id": "proj_3"}},
        {"target": "key_1", "project_id": "proj_4"},
        {"target": "user_1"},
    ]
    async with db.begin() as conn:
        for call in calls:
            await record(conn, org_id=org_id, actor=ALICE, action="api_key.created", **call)
    found = [row.project_id for row in await all_entries(db, org_id)]
    assert found == ["proj_2", "proj_3", "proj_4", None]


async def test_concurrent_changes_make_one_chain_without_gaps(db: AsyncEngine) -> None:
    first, second = await an_org(db), await an_org(db, "other")

    async def change(number: int) -> None:
        async with db.begin() as conn:
            org_id = second if number % 5 == 0 else first
            await record(
                conn, org_id=org_id, actor=ALICE, action="user.updated", target=f"user_{number}"
            )
            if number % 3 == 0:
                await conn.rollback()

    await asyncio.gather(*(change(number) for number in range(30)))
    for org_id, count in ((first, 16), (second, 4)):
        rows = await all_entries(db, org_id)
        assert [row.sequence for row in rows] == list(range(1, count + 1))
        assert [row.previous for row in rows] == [GENESIS, *(row.hash for row in rows[:-1])]
        assert sorted(row.occurred_at for row in rows) == [row.occurred_at for row in rows]
        async with db.connect() as conn:
            head = (await conn.execute(sa.select(heads).where(heads.c.org_id == org_id))).one()
        assert (head.sequence, head.hash) == (count, rows[-1].hash)


async def test_many_at_once_are_a_chain_as_one_by_one_is(
    db: AsyncEngine,
) -> None:
    """In their order; and if one may not be recorded, none is."""
    org_id = await an_org(db)

    def events(*after: dict[str, Any]) -> list[AuditRecord]:
        named = enumerate(after)
        return [
            AuditRecord(actor=ALICE, action="mcp.called", target=f"call_{n}", after=each)
            for n, each in named
        ]

    with pytest.raises(SecretInAudit):
        async with db.begin() as conn:
            await record_all(conn, org_id=org_id, events=events({"n": 0}, {"password": "x"}))
    async with db.begin() as conn:
        await record_all(conn, org_id=org_id, events=[])
        await record(conn, org_id=org_id, actor=ALICE, action="user.updated", target="user_1")
        statements: list[str] = []
        sync = db.sync_engine
        sa.event.listen(sync, "before_cursor_execute", lambda *told: statements.append(told[2]))
        await record_all(conn, org_id=org_id, events=events(*({"n": n} for n in range(300))))
        assert len(statements) == 3
    rows = await all_entries(db, org_id)
    assert [row.target for row in rows] == ["user_1", *(f"call_{n}" for n in range(300))]
    assert [row.sequence for row in rows] == list(range(1, 302))
    assert [row.previous for row in rows] == [GENESIS, *(row.hash for row in rows[:-1])]
    for row in rows:
        fields = {name: getattr(row, name) for name in AuditEntry.__struct_fields__}
        assert row.hash == digest(AuditEntry(**fields))
    async with db.connect() as conn:
        head = (await conn.execute(sa.select(heads).where(heads.c.org_id == org_id))).one()
    assert (head.sequence, head.hash) == (301, rows[-1].hash)


async def test_operators_in_each_others_orgs_wait_for_nobody_in_a_circle(db: AsyncEngine) -> None:
    """Both logs tell of it, the org's own in which project it was."""
    first, second = await an_org(db), await an_org(db, "other")

    async def change(org_id: str, operator_org: str | None) -> None:
        async with db.begin() as conn:
            await record_for_both(
                conn,
                org_id=org_id,
                operator_org=operator_org,
                project_id="proj_1",
                actor=ALICE,
                action="spend_cap.updated",
                target=f"cap_of_{org_id}",
            )

    pairs = [(first, second), (second, first), (first, first), (first, None)]
    async with asyncio.timeout(30):
        await asyncio.gather(*(change(*pair) for pair in pairs * 8))
    for own, num_own, num_other in ((first, 24, 8), (second, 8, 8)):
        rows = await all_entries(db, own)
        found = [(row.target == f"cap_of_{own}", row.project_id) for row in rows]
        assert found.count((True, "proj_1")) == num_own
        assert found.count((False, None)) == num_other
        assert len(found) == num_own + num_other


async def test_an_unknown_org_has_no_log(db: AsyncEngine) -> None:
    async with db.begin() as conn:
        with pytest.raises(LookupError, match="org_none"):
            await record(conn, org_id="org_none", actor=ALICE, action="a.b", target="x")


CHANGES = [
    "UPDATE audit_entries SET action = 'user.added'",
    "DELETE FROM audit_entries",
    "TRUNCATE audit_entries",
    "TRUNCATE audit_heads",
    "DELETE FROM audit_heads",
    "UPDATE audit_heads SET sequence = 0",
    "UPDATE audit_heads SET hash = previous FROM audit_entries",
]


@pytest.mark.parametrize("statement", CHANGES)
@pytest.mark.parametrize("role", [None, ROLE_SYSTEM, ROLE_TENANT])
async def test_nobody_changes_what_was_recorded(
    db: AsyncEngine, postgres_url: str, role: str | None, statement: str
) -> None:
    org_id = await an_org(db)
    async with db.begin() as conn:
        await record(conn, org_id=org_id, actor=ALICE, action="user.added", target="user_1")
    engine = create_engine(postgres_url, role=role, pool_size=1)
    with pytest.raises(DBAPIError, match=r"only grows|permission denied"):
        async with tenant(engine, org_id) as conn:
            await conn.execute(sa.text(statement))
    await engine.dispose()
    assert len(await all_entries(db, org_id)) == 1


async def test_a_tenant_records_and_reads_its_own_log_alone(
    db: AsyncEngine, postgres_url: str
) -> None:
    mine, other = await an_org(db), await an_org(db, "other")
    engine = create_engine(postgres_url, role=ROLE_TENANT, pool_size=1)
    async with tenant(engine, mine) as conn:
        await record(conn, org_id=mine, actor=ALICE, action="user.added", target="user_1")
    with pytest.raises(LookupError):
        async with tenant(engine, mine) as conn:
            await record(conn, org_id=other, actor=ALICE, action="user.added", target="user_1")
    async with tenant(engine, other) as conn:
        assert await conn.scalar(sa.select(sa.func.count()).select_from(entries)) == 0
        assert list(await conn.scalars(sa.select(heads.c.org_id))) == [other]
    await engine.dispose()


SECRET = "sk-tg-" + "a" * 43


@pytest.mark.parametrize(
    "state",
    [
        {"secret": "x"},
        {"client_secret": "x"},
        {"deep": [{"password": "x"}]},
        {"refresh_token": "x"},
        {"key_hash": "x"},
        {"password_hash": b"x"},
        {"note": f"use {SECRET}"},
        {"list": ["a", SECRET]},
        {"jwt": "eyJhbGciOiJub25l.eyJzdWIiOiJhbGlj.x"},
        {"pem": "-----BEGIN PRIVATE KEY-----"},
        {"crypt": "$argon2id$v=19$m=65536"},
        {"client": "tg-secret-" + "-_a" * 15},
        {"link": "https://x.example/invites/accept?token=abc"},
    ],
)
async def test_a_secret_is_refused_and_not_repeated(db: AsyncEngine, state: dict[str, Any]) -> None:
    org_id = await an_org(db)
    with pytest.raises(SecretInAudit) as refused:
        async with db.begin() as conn:
            await record(
                conn, org_id=org_id, actor=COMMAND_LINE, action="a.b", target="x", after=state
            )
    assert SECRET not in str(refused.value)
    assert await all_entries(db, org_id) == []


def test_what_only_sounds_like_a_secret_is_fine() -> None:
    refuse_secrets(
        {
            "tokens_per_minute": 1,
            "token_endpoint_auth_method": "none",
            "password": True,
            "secret": None,
            "key_id": "key_1",
        }
    )


async def test_a_huge_state_is_refused(db: AsyncEngine) -> None:
    org_id = await an_org(db)
    with pytest.raises(ValueError, match="bytes of state"):
        async with db.begin() as conn:
            state = {"name": "x" * 300_000}
            await record(conn, org_id=org_id, actor=ALICE, action="a.b", target="x", after=state)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.dictionaries(st.text(), JSON))
def test_the_canonical_form_does_not_depend_on_the_order_of_keys(value: dict[str, Any]) -> None:
    backwards = dict(reversed(value.items()))
    assert canonical(backwards) == canonical(value)
