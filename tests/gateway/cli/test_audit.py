"""`tollgate audit verify` on a real home: 0 where all is whole, and 1 where it is not."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.log import COMMAND_LINE, record
from gateway.db import create_engine
from tests.gateway.cli.test_main import environ, folder, invoke

__all__ = ["environ", "folder"]


def on_database(environ: dict[str, str], *statements: str) -> None:
    """As a superuser, past every trigger."""

    async def work() -> None:
        engine = create_engine(environ["TOLLGATE_DATABASE_URL"], pool_size=1)
        async with engine.begin() as conn:
            await conn.execute(sa.text("SET LOCAL session_replication_role = replica"))
            for statement in statements:
                await conn.execute(sa.text(statement))
        await engine.dispose()

    asyncio.run(work())


def log_changes(environ: dict[str, str], count: int) -> None:
    async def change(conn: AsyncConnection) -> None:
        org_id = await conn.scalar(sa.text("SELECT id FROM orgs WHERE name = 'default'"))
        for number in range(count):
            target = f"proj_{number}"
            await record(
                conn, org_id=org_id, actor=COMMAND_LINE, action="project.updated", target=target
            )

    async def work() -> None:
        engine = create_engine(environ["TOLLGATE_DATABASE_URL"], pool_size=1)
        async with engine.begin() as conn:
            await change(conn)
        await engine.dispose()

    asyncio.run(work())


@pytest.fixture
def installed(environ: dict[str, str]) -> dict[str, str]:
    assert invoke(environ, "migrate").exit_code == 0
    assert invoke(environ, "orgs", "create", "--name", "acme").exit_code == 0
    log_changes(environ, 5)
    return environ


def test_what_is_whole_is_said_so_and_witnessed(installed: dict[str, str]) -> None:
    done = invoke(installed, "audit", "verify")
    assert done.exit_code == 0 and done.output.count("  whole, ") == 2, done.output
    one = invoke(installed, "audit", "verify", "--org", "default", "--json")
    verdict = json.loads(one.stdout)
    assert verdict["finding"] is None and one.exit_code == 0
    path = Path(installed["TOLLGATE_HOME"]) / "audit_witness.json"
    witness = json.loads(path.read_bytes())
    assert len(witness) == 2 and witness[verdict["org_id"]] == verdict["standing"]
    by_id = invoke(installed, "audit", "verify", "--org", verdict["org_id"])
    assert by_id.exit_code == 0 and by_id.stdout.startswith(verdict["org_id"])


def test_the_first_bad_entry_is_named(installed: dict[str, str]) -> None:
    last = json.loads(invoke(installed, "audit", "verify", "--org", "default", "--json").stdout)
    number = last["standing"]["sequence"] - 2
    on_database(
        installed,
        f"UPDATE audit_entries SET target = 'proj_x' WHERE sequence >= {number}"
        f" AND org_id = '{last['org_id']}'",
    )
    done = invoke(installed, "audit", "verify")
    assert done.exit_code == 1
    (bad,) = [line for line in done.stdout.splitlines() if "BROKEN" in line]
    assert f"entry {number} (audit_log-" in bad and "not what was recorded" in bad
    assert "  whole, " in done.stdout, "the other organization's"
    assert invoke(installed, "audit", "verify", "--org", "acme").exit_code == 0


def test_a_tail_cut_off_together_with_the_head_is_missed(installed: dict[str, str]) -> None:
    assert invoke(installed, "audit", "verify").exit_code == 0
    on_database(
        installed,
        "DELETE FROM audit_entries e USING audit_heads h"
        " WHERE h.org_id = e.org_id AND e.sequence = h.sequence",
        "UPDATE audit_heads h SET sequence = e.sequence, hash = e.hash FROM audit_entries e"
        " WHERE e.org_id = h.org_id AND e.sequence = h.sequence - 1",
    )
    done = invoke(installed, "audit", "verify")
    assert done.exit_code == 1 and "were here at the last verification" in done.stdout
    again = invoke(installed, "audit", "verify")
    assert again.exit_code == 1, "what is broken is never witnessed"


def test_mistakes_are_one_line(installed: dict[str, str], folder: Path) -> None:
    unknown = invoke(installed, "audit", "verify", "--org", "nobody")
    assert unknown.exit_code == 2 and "no organization 'nobody'" in unknown.output
    (Path(installed["TOLLGATE_HOME"]) / "audit_witness.json").write_text("{")
    broken = invoke(installed, "audit", "verify")
    assert broken.exit_code == 1 and "audit_witness.json" in broken.output
    nowhere = invoke(installed | {"TOLLGATE_HOME": str(folder / "none")}, "audit", "verify")
    assert nowhere.exit_code == 2
