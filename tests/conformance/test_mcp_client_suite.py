"""The public conformance suite's client scenarios: the bridge and the vault as the client of its
servers and of their authorization servers, in both revisions.

`make mcp-conformance ROLE=client` installs the suite (npm) and runs this alone.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import tempfile
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.log import COMMAND_LINE
from gateway.tenancy.members.users import create_user
from gateway.tenancy.orgs import create_org
from tests.conformance.mcp_client import taking
from tests.conformance.mcp_tenant import Lent
from tests.conformance.test_mcp_suite import REQUIREMENTS, SUITE, pytestmark
from tests.conformance.world import NODE
from tests.mcp_bridge.processes import LEGACY, MODERN

__all__ = ["pytestmark"]

SCORED = {LEGACY: 18, MODERN: 32}
"""Scenarios of each revision."""
REFUSALS = {
    "auth/scope-retry-limit": "insufficient_scope",
    "auth/resource-mismatch": "its metadata is about another resource",
    "auth/iss-supported-missing": "an answer of another issuer",
    "auth/iss-wrong-issuer": "an answer of another issuer",
    "auth/iss-unexpected": "an answer of another issuer",
    "auth/iss-normalized": "an answer of another issuer",
    "auth/metadata-issuer-mismatch": "the metadata of its issuer is another one's",
}
"""Scenarios that a client is right not to go through, and what ours says."""
SCENARIO_MS = 60_000


@pytest.fixture
async def lent(db: AsyncEngine, postgres_url: str, redis_url: str) -> Lent:
    async with db.begin() as conn:
        org = await create_org(conn, name="conformance", actor=COMMAND_LINE)
        user = await create_user(
            conn,
            org_id=org.id,
            email="ann@example.com",
            name="Ann",
            role="developer",
            actor=COMMAND_LINE,
        )
    return Lent(redis_url=redis_url, postgres_url=postgres_url, org_id=org.id, user_id=user.id)


def required(revision: str) -> set[str]:
    section = (REQUIREMENTS / f"{revision}.yaml").read_text().partition("\nclient:\n")[2]
    lines = re.split(r"\n\w", section)[0].splitlines()
    return {line.strip().removeprefix("- ") for line in lines if line.strip().startswith("- ")}


@pytest.mark.parametrize("revision", [LEGACY, MODERN])
def test_these_are_all_scenarios(revision: str) -> None:
    assert len(required(revision)) == SCORED[revision]


@pytest.mark.parametrize("revision", [LEGACY, MODERN])
async def test_the_bridge_passes_as_a_client(lent: Lent, revision: str, tmp_path: Path) -> None:
    """A check that warns counts as one that fails."""
    socket = Path(tempfile.mkdtemp(prefix="tg-", dir="/tmp")) / "scenarios"
    try:
        async with taking(lent, socket) as (command, failed):
            suite = await asyncio.create_subprocess_exec(
                *(NODE, SUITE, "client", "--command", command, "--requirements", revision),
                *("--timeout", str(SCENARIO_MS), "-o", tmp_path),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            said, _ = await suite.communicate()
    finally:
        shutil.rmtree(socket.parent)
    found = verdicts(tmp_path, required(revision))
    assert found.keys() == required(revision), "a scenario did not run"
    assert not {name for name, bad in found.items() if bad}, said.decode()
    assert failed.keys() & found.keys() == REFUSALS.keys() & found.keys()
    for name in failed.keys() & found.keys():
        assert REFUSALS[name] in str(failed[name])


def verdicts(folder: Path, scenarios: set[str]) -> dict[str, list[str]]:
    """Return, for each scenario that ran, the checks that do not pass."""
    found: dict[str, list[str]] = {}
    for file in folder.rglob("checks.json"):
        name = re.sub(r"-\d{4}-\d\d-\d\dT.*", "", str(file.parent.relative_to(folder)))
        if name in scenarios:
            checks = json.loads(file.read_text())
            bad = [each["id"] for each in checks if each["status"] in ("FAILURE", "WARNING")]
            found[name] = bad
    return found
