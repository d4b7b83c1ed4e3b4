"""The server and the load that the MCP bridge is measured with: they speak both eras."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from bench.mcp import SITES, claims
from bench.tools.load import closed_loop
from bench.tools.mcp_load import McpTarget, Requests, call_of
from bench.tools.mcp_upstream import LEGACY, MODERN, TOOL, Server


@pytest_asyncio.fixture
async def url() -> AsyncIterator[str]:
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


@pytest.mark.parametrize("site", SITES)
async def test_a_server_of_each_era_is_called_and_listed(url: str, site: str) -> None:
    place, era = McpTarget(f"{url}/{site}"), SITES[site]
    for asked in (call_of(TOOL), ("tools/list", {})):
        requests = await asyncio.to_thread(Requests, place, era, *asked, 2)
        tally = await closed_loop(requests, connections=2, duration_s=0.05)
        assert tally.num_errors == 0 and tally.latencies_s
        await asyncio.to_thread(requests.close)


async def test_what_is_no_result_ends_the_run(url: str) -> None:
    for site, method in (("new", "nothing"), ("old", "nothing"), ("nowhere", "tools/list")):
        with pytest.raises(SystemExit):
            era = SITES.get(site, MODERN)
            await asyncio.to_thread(Requests, McpTarget(f"{url}/{site}"), era, method, {}, 1)


def test_a_claim_is_of_the_worst_of_all() -> None:
    good = {"added": {"p50": {"added_ms": 1.9}}, "recorded_per_s": 501.0}
    found = {
        "calls": {"a": good, "b": good},
        "lists": {f"{era}_ms": {"p50": 4.9} for era in (MODERN, LEGACY)},
        "sessions": {"sessions": 1000, "open_mb": {"resident": 299.0}},
    }
    assert all(claims(found).values())
    slow = {**found, "calls": {"a": good, "b": {**good, "added": {"p50": {"added_ms": 2.1}}}}}
    assert [name for name, held in claims(slow).items() if not held] == ["added_p50_at_most_2_ms"]
    few = {**found, "sessions": {"sessions": 50, "open_mb": {"resident": 100.0}}}
    assert [name for name, held in claims(few).items() if not held] == [
        "1000_sessions_at_most_300_mb"
    ]
