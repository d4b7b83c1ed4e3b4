"""A gateway tells its servers' health to an admin by the API and to a scraper by /metrics."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import requests
from mcp.shared.exceptions import MCPError

from mcp_bridge.upstream.circuit_breaker import FAILURES_TO_REST
from tests.databases import Databases
from tests.gateway.routes.openapi.fresh import fresh_worker, mcp_client
from tests.gateway.routes.openapi.running import TIMEOUT_S, Running
from tests.mcp_bridge.counting import counting

CONFIG = """
[[mcp.servers]]
name = "shaky"
url = "URL"
network = "loopback"
trust = "all"
"""


async def call(worker: Running, times: int) -> int:
    """How many were answered."""
    answered = 0
    async with mcp_client(worker, worker.everything) as client:
        for _ in range(times):
            try:
                await client.call_tool("shaky__look", {"n": 1})
            except MCPError:
                continue
            answered += 1
    return answered


def health_of(worker: Running, key: str) -> dict[str, Any] | None:
    headers = {"authorization": f"Bearer {key}"}
    url = f"{worker.url}/v1/admin/mcp/servers"
    answer = worker.session.get(url, headers=headers, timeout=TIMEOUT_S)
    [server] = [one for one in answer.json()["data"] if one["name"] == "shaky"]
    assert (server["recheck_s"], server["era"]) == (1.0, "auto")
    found: dict[str, Any] | None = server["health"]
    return found


def metrics_of(worker: Running) -> dict[str, float]:
    worker.run(observed(worker))
    lines = requests.get(f"{worker.url}/metrics", timeout=TIMEOUT_S).text.splitlines()
    found = (line.rpartition(" ") for line in lines if line.startswith("tollgate_mcp"))
    return {name: float(value) for name, _, value in found}


async def observed(worker: Running) -> None:
    worker.services.observe()


def test_a_server_that_fails_is_said_to_rest_and_for_whom(
    databases: Databases, redis_server_url: str, tmp_path: Path
) -> None:
    with counting() as server:
        given = {"more": CONFIG.replace("URL", server.url)}
        with fresh_worker(databases, redis_server_url, tmp_path, **given) as worker:
            key = worker.everything
            assert health_of(worker, key) is None, "nobody has asked it"
            began = int(time.time())
            assert asyncio.run(call(worker, 2)) == 2
            well = health_of(worker, key)
            assert well is not None and began <= well.pop("last_answer_at") <= time.time()
            assert well == {
                "object": "mcp.server.health",
                "state": "closed",
                "connections": 1,
                "failures_in_a_row": 0,
                "last_failure": None,
                "failing_since": None,
                "retry_at": None,
            }
            server.is_down = True
            assert asyncio.run(call(worker, FAILURES_TO_REST)) == 0
            ill = health_of(worker, key)
            assert ill is not None
            assert (ill["state"], ill["last_failure"]) == ("resting", "status_503")
            assert ill["failures_in_a_row"] >= FAILURES_TO_REST
            assert began <= ill["failing_since"] <= time.time()
            assert worker.services.mcp is not None
            assert worker.services.mcp.health("org_of_others") == []
            found = metrics_of(worker)
            resting = 'tollgate_mcp_upstreams{server="shaky",state="resting"}'
            assert found[resting] == 1.0
            assert found['tollgate_mcp_calls_total{outcome="done",server="shaky"}'] == 2.0
            failed = found['tollgate_mcp_calls_total{outcome="failed",server="shaky"}']
            assert 1 <= failed <= FAILURES_TO_REST
