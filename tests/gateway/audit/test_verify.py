"""Verification finds out whoever writes to Postgres as he likes, triggers and constraints off."""

from __future__ import annotations

from collections.abc import Mapping

import hypothesis.strategies as st
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.audit import verify as verification
from gateway.audit.chain import AuditEntry, digest
from gateway.audit.log import Actor, record
from gateway.audit.tables import entries, heads
from gateway.audit.verify import ChainPosition, Verdict, verify
from gateway.tenancy.tables import orgs
from tests.budget import examples, pairs

COUNT = 7
ALICE = Actor(kind="user", id="user_alice", ip="192.0.2.1", request_id="req_1")


async def a_log(db: AsyncEngine, name: str = "acme", count: int = COUNT) -> str:
    async with db.begin() as conn:
        org_id = f"org_{name}"
        await conn.execute(sa.insert(orgs).values(id=org_id, name=name))
        for number in range(count):
            await record(
                conn,
                org_id=org_id,
                actor=ALICE,
                action="project.updated",
                target=f"proj_{number}",
                before={"number": number},
                after={"number": number + 1},
            )
    return org_id


async def verdicts(
    db: AsyncEngine, witness: Mapping[str, ChainPosition] | None = None
) -> dict[str, Verdict]:
    return {each.org_id: each async for each in verify(db, witness or {})}


async def tamper(db: AsyncEngine, *statements: str) -> None:
    """As a superuser, with every trigger and constraint out of the way."""
    async with db.begin() as conn:
        await conn.execute(sa.text("SET LOCAL session_replication_role = replica"))
        for name in ("sequence_check", "actor_kind_check", "previous_check", "hash_check"):
            await conn.execute(
                sa.text(f"ALTER TABLE audit_entries DROP CONSTRAINT IF EXISTS audit_entries_{name}")
            )
        await conn.execute(
            sa.text("ALTER TABLE audit_entries DROP CONSTRAINT IF EXISTS audit_entries_pkey")
        )
        for statement in statements:
            assert (await conn.execute(sa.text(statement))).rowcount > 0, statement


async def test_what_was_recorded_is_whole(db: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "BATCH", 3)
    first, second, empty = await a_log(db), await a_log(db, "b", 3), await a_log(db, "c", 0)
    found = await verdicts(db)
    assert {org: (v.finding, v.standing.sequence) for org, v in found.items()} == {
        first: (None, COUNT),
        second: (None, 3),
        empty: (None, 0),
    }
    witness = {org: verdict.standing for org, verdict in found.items()}
    async with db.begin() as conn:
        await record(conn, org_id=first, actor=ALICE, action="user.added", target="user_1")
    assert all(verdict.finding is None for verdict in (await verdicts(db, witness)).values())


OTHER = {
    "org_id": "'org_other'",
    "sequence": "100",
    "id": "'audit_log-other'",
    "occurred_at": "occurred_at + interval '1 microsecond'",
    "action": "'user.added'",
    "target": "'proj_other'",
    "project_id": "NULL",
    "actor_kind": "'system'",
    "actor_id": "'user_mallory'",
    "on_behalf_of": "''",
    "ip": "'192.0.2.2'",
    "request_id": "NULL",
    "before": "before || ' '",
    "after": "NULL",
    "previous": "decode(repeat('01', 32), 'hex')",
    "hash": "decode(repeat('01', 32), 'hex')",
}


def test_every_column_is_tampered_with() -> None:
    assert set(OTHER) == set(entries.c.keys()) == {*AuditEntry.__struct_fields__, "hash"}


@pytest.mark.parametrize(("column", "sequence"), pairs(list(OTHER), ("1", "4", str(COUNT)), 1))
async def test_an_edit_of_any_column_is_found(db: AsyncEngine, column: str, sequence: str) -> None:
    org_id = await a_log(db)
    at = f"WHERE sequence = {sequence}"
    await tamper(db, f"UPDATE audit_entries SET {column} = {OTHER[column]} {at}")
    finding = (await verdicts(db))[org_id].finding
    assert finding is not None and finding.sequence == int(sequence)


async def test_an_impossible_moment_is_found(db: AsyncEngine) -> None:
    org_id = await a_log(db)
    await tamper(db, "UPDATE audit_entries SET occurred_at = 'infinity' WHERE sequence = 2")
    finding = (await verdicts(db))[org_id].finding
    assert finding is not None and finding.sequence == 2


MOVED = "UPDATE audit_entries SET sequence = CASE sequence WHEN 3 THEN 5 ELSE 3 END"
CASES = {
    "a gap": ("DELETE FROM audit_entries WHERE sequence = 4", 4),
    "no beginning": ("DELETE FROM audit_entries WHERE sequence = 1", 1),
    "no tail": ("DELETE FROM audit_entries WHERE sequence >= 6", 6),
    "nothing left": ("DELETE FROM audit_entries", 1),
    "an order": (f"{MOVED} WHERE sequence IN (3, 5)", 3),
    "a copy": (
        "INSERT INTO audit_entries SELECT (jsonb_populate_record(NULL::audit_entries,"
        ' to_jsonb(e) || \'{"id": "x"}\')).* FROM audit_entries e WHERE sequence = 4',
        4,
    ),
    "a zeroth": (
        "INSERT INTO audit_entries SELECT (jsonb_populate_record(NULL::audit_entries,"
        ' to_jsonb(e) || \'{"id": "x", "sequence": 0}\')).* FROM audit_entries e'
        " WHERE sequence = 4",
        0,
    ),
    "an earlier head": ("UPDATE audit_heads SET sequence = 5", 6),
    "a later head": ("UPDATE audit_heads SET sequence = 9", COUNT + 1),
    "another head": ("UPDATE audit_heads SET hash = decode(repeat('01', 32), 'hex')", COUNT),
    "no head": ("DELETE FROM audit_heads", COUNT + 1),
}


@pytest.mark.parametrize("case", CASES)
async def test_a_gap_an_insertion_a_new_order_or_a_lost_tail_is_found(
    db: AsyncEngine, case: str
) -> None:
    statement, sequence = CASES[case]
    org_id = await a_log(db)
    await tamper(db, statement)
    finding = (await verdicts(db))[org_id].finding
    assert finding is not None and finding.sequence == sequence


async def rewrite(conn: AsyncConnection, org_id: str, count: int) -> None:
    """A forger who knows how this works: every hash anew, and the head with them."""
    previous = bytes(32)
    rows = list(await conn.execute(sa.select(entries).order_by(entries.c.sequence)))
    for row in rows[:count]:
        fields = dict(row._mapping) | {"previous": previous, "target": "proj_forged"}
        del fields["hash"]
        previous = digest(AuditEntry(**fields))
        changed = sa.update(entries).where(entries.c.sequence == row.sequence)
        await conn.execute(changed.values(**fields, hash=previous))
    await conn.execute(sa.delete(entries).where(entries.c.sequence > count))
    await conn.execute(sa.update(heads).values(sequence=count, hash=previous))


@pytest.mark.parametrize("count", [0, 3, COUNT])
async def test_a_chain_that_was_forged_whole_does_not_come_by_the_witness(
    db: AsyncEngine, count: int
) -> None:
    org_id = await a_log(db)
    witness = {org_id: (await verdicts(db))[org_id].standing}
    async with db.begin() as conn:
        await conn.execute(sa.text("SET LOCAL session_replication_role = replica"))
        await rewrite(conn, org_id, count)
    assert (await verdicts(db))[org_id].finding is None, "without a witness nothing shows it"
    finding = (await verdicts(db, witness))[org_id].finding
    assert finding is not None and "last verification" in finding.problem


async def test_a_log_that_is_gone_with_its_head_is_missed(db: AsyncEngine) -> None:
    org_id = await a_log(db)
    witness = {org_id: (await verdicts(db))[org_id].standing}
    await tamper(db, "DELETE FROM audit_entries", "DELETE FROM audit_heads")
    finding = (await verdicts(db, witness))[org_id].finding
    assert finding is not None and finding.sequence == 1


@pytest.fixture
async def long_log(db: AsyncEngine) -> tuple[AsyncEngine, str]:
    return db, await a_log(db, count=20)


EDITS = st.lists(
    st.tuples(st.sampled_from(["edit", "delete", "swap"]), st.integers(1, 20), st.integers(1, 20)),
    min_size=1,
    max_size=4,
)


@settings(
    max_examples=examples(15),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(edits=EDITS)
async def test_the_first_entry_that_differs_is_named(
    long_log: tuple[AsyncEngine, str], edits: list[tuple[str, int, int]]
) -> None:
    db, org_id = long_log
    async with db.connect() as conn:
        transaction = await conn.begin()
        whole = list(await conn.execute(sa.select(entries).order_by(entries.c.sequence)))
        await conn.execute(sa.text("SET LOCAL session_replication_role = replica"))
        await conn.execute(sa.text("ALTER TABLE audit_entries DROP CONSTRAINT audit_entries_pkey"))
        for kind, one, other in edits:
            await conn.execute(
                sa.text(
                    {
                        "edit": "UPDATE audit_entries SET target = target || 'x'"
                        " WHERE sequence = :one",
                        "delete": "DELETE FROM audit_entries WHERE sequence = :one",
                        "swap": "UPDATE audit_entries SET sequence ="
                        " CASE sequence WHEN :one THEN CAST(:other AS bigint)"
                        " ELSE CAST(:one AS bigint) END WHERE sequence IN (:one, :other)",
                    }[kind]
                ),
                {"one": one, "other": other} if kind == "swap" else {"one": one},
            )
        now = list(await conn.execute(sa.select(entries).order_by(entries.c.sequence)))
        verdict = await verification.verify_org(conn, org_id, verification.NOWHERE)
        await transaction.rollback()
    differs = [n for n, (a, b) in enumerate(zip(whole, now, strict=False), 1) if a != b]
    expected = min([*differs, len(now) + 1])
    if now == whole:
        assert verdict.finding is None
    else:
        assert verdict.finding is not None and verdict.finding.sequence == expected
