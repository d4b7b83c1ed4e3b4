"""The calls of an organization, out of its audit log: newest first, by pages, with names."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.audit.log import COMMAND_LINE, Actor, AuditRecord, record_all
from gateway.db import tenant
from gateway.mcp.admin.call_log import KINDS, names_of, read_calls
from gateway.tenancy.orgs import create_org
from gateway.tenancy.projects import create_project

NOW = datetime.now(UTC)
HOUR = {"start": NOW - timedelta(hours=1), "end": NOW + timedelta(hours=1)}


@pytest.fixture
async def orgs(db: AsyncEngine) -> list[str]:
    async with db.begin() as conn:
        made = [
            (await create_org(conn, name=name, actor=COMMAND_LINE)).id
            for name in ("alice", "mallory")
        ]
    for org_id in made:
        async with tenant(db, org_id) as conn:
            await record_all(conn, org_id=org_id, events=[event(n) for n in range(12)])
    return made


def event(n: int) -> AuditRecord:
    kind = (*KINDS, "listed")[n % 5]
    return AuditRecord(
        actor=Actor(kind="client", id=f"key_{n % 2}"),
        action=f"mcp.{kind}",
        target="files" if n % 3 else "web",
        after={"tool": f"tool_{n}", "outcome": "done"},
    )


async def names(conn: AsyncConnection, org_id: str, **asked: Any) -> list[str]:
    found, _ = await read_calls(conn, org_id, **(HOUR | {"limit": 50} | asked))
    return [each.name for each in found]


async def test_calls_come_newest_first_by_pages(tenant_db: AsyncEngine, orgs: list[str]) -> None:
    wanted = [f"tool_{n}" for n in reversed(range(12)) if n % 5 != 4]
    async with tenant(tenant_db, orgs[0]) as conn:
        assert await names(conn, orgs[0]) == wanted
        seen: list[str] = []
        before, more = None, True
        while more:
            page, more = await read_calls(conn, orgs[0], **HOUR, before=before, limit=4)
            seen += [each.name for each in page]
            before = page[-1].sequence
        assert seen == wanted
        assert await names(conn, orgs[1]) == [], "of another organization"


async def test_calls_are_filtered(tenant_db: AsyncEngine, orgs: list[str]) -> None:
    async with tenant(tenant_db, orgs[0]) as conn:
        assert await names(conn, orgs[0], kinds=["denied"]) == ["tool_11", "tool_6", "tool_1"]
        assert await names(conn, orgs[0], server="web") == ["tool_6", "tool_3", "tool_0"]
        assert await names(conn, orgs[0], server="web", client_id="key_1") == ["tool_3"]
        later = {"start": NOW + timedelta(minutes=30)}
        assert await names(conn, orgs[0], **later) == []


async def test_ids_have_their_names_where_they_are_ones_own(
    tenant_db: AsyncEngine, orgs: list[str]
) -> None:
    made = []
    for org_id in orgs:
        async with tenant(tenant_db, org_id) as conn:
            project = await create_project(conn, org_id=org_id, name="web", actor=COMMAND_LINE)
            made.append(project.id)
    async with tenant(tenant_db, orgs[0]) as conn:
        assert await names_of(conn, orgs[0], [*made, "key_0", None]) == {made[0]: "web"}
        assert await names_of(conn, orgs[0], []) == {}
