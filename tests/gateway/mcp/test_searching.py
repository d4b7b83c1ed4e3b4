"""A catalogue that is searched, in front of a worker as it runs: by what tools mean, on the bill of
whoever searches, and by their words where that cannot be had."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from gateway.db import tenant
from gateway.settings.file import SettingsError
from gateway.settings.load import load
from tests.databases import Databases
from tests.gateway.routes.openapi.fresh import fresh_worker, mcp_client
from tests.gateway.routes.openapi.running import TIMEOUT_S, Running
from tests.journeys.upstreams import answers
from tests.mcp_bridge.processes import running as processes

CONFIG = """
[[mcp.servers]]
name = "new"
url = "URL"
network = "loopback"
trust = "all"
[[mcp.servers]]
name = "waits"
url = "URL"
network = "loopback"
[mcp]
max_catalogue_tokens = 100
search_model = "MODEL"
scan_model = "MODEL"
"""
EMBEDDED = sa.text("""
    SELECT embedding_input FROM usage_events
    WHERE kind = 'usage' AND embedding_input > 0 ORDER BY occurred_at, embedding_input DESC
""")


OF_THE_HOUSE = sa.text("""
    SELECT kind, model, embedding_input FROM usage_events WHERE org = 'house'
""")


@pytest.fixture(params=["near", "far"])
def worker(
    request: pytest.FixtureRequest,
    databases: Databases,
    redis_server_url: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Running]:
    """`near`: our engine makes the embeddings; `far`: an upstream does."""
    folder: Path = tmp_path_factory.mktemp("searching")
    with processes(("fixture_server", "--port", "0", "--era", "2026-07-28")) as (new,):
        more = CONFIG.replace("URL", new.url).replace("MODEL", request.param)
        with fresh_worker(databases, redis_server_url, folder, more=more) as found:
            found.search_model = request.param  # type: ignore[attr-defined]
            yield found


def embedded(worker: Running) -> list[int]:
    """Tokens of each request for embeddings that is on the bill."""

    async def work() -> list[int]:
        async with tenant(worker.services.db, worker.org_id) as conn:
            return [row.embedding_input for row in await conn.execute(EMBEDDED)]

    return worker.run(work())


def test_tools_are_found_and_called(worker: Running) -> None:
    async def work() -> tuple[list[str], list[list[str]], Any]:
        async with mcp_client(worker, worker.everything) as client:
            listed = [tool.name for tool in (await client.list_tools()).tools]
            found = []
            for query in ("add two numbers", "an image"):
                result = await client.call_tool("tools.search", {"query": query})
                assert not result.is_error and result.structured_content is not None
                found.append([tool["name"] for tool in result.structured_content["tools"]])
            called = await client.call_tool(
                "tools.call", {"name": "new__test_simple_text", "arguments": {}}
            )
            return listed, found, called

    listed, found, called = asyncio.run(work())
    assert listed == ["tools.search", "tools.call"]
    assert all(found) and all(name.startswith("new__") for names in found for name in names)
    assert not called.is_error and called.content[0].text
    if worker.search_model == "near":  # type: ignore[attr-defined]
        deadline = time.monotonic() + TIMEOUT_S
        while len(bill := embedded(worker)) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(bill) == 3 and bill[0] > 10 * bill[1], "all tools once, then each query"


def offer_notes(worker: Running) -> list[str]:
    answer = worker.session.get(
        f"{worker.url}/v1/admin/mcp/servers/waits",
        headers={"authorization": f"Bearer {worker.everything}"},
        timeout=TIMEOUT_S,
    )
    assert answer.status_code == 200, answer.text
    offer = answer.json()
    assert offer["state"] == "waiting" and offer["changes"]
    notes: list[str] = offer["notes"]
    return notes


def test_an_offer_is_compared_by_meaning_at_the_expense_of_the_house(
    worker: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, model = embedded(worker), worker.search_model  # type: ignore[attr-defined]
    if model == "far":
        with monkeypatch.context() as broken:
            broken.setattr(worker.far, "script", answers(500))
            (note,) = offer_notes(worker)
        assert note.startswith("Not compared by meaning: ")
    assert offer_notes(worker) == []

    async def of_the_house() -> list[tuple[str, str, int]]:
        async with tenant(worker.services.db, "house") as conn:
            return [tuple(row) for row in await conn.execute(OF_THE_HOUSE)]

    deadline = time.monotonic() + TIMEOUT_S
    while not (booked := worker.run(of_the_house())) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert {one[:2] for one in booked} == {("waste", model)}
    assert all(tokens > 0 for _, _, tokens in booked)
    assert embedded(worker) == before, "no tenant is billed"


def test_a_search_model_is_one_that_is_configured(tmp_path: Path) -> None:
    config = tmp_path / "t.toml"
    config.write_text('[mcp]\nsearch_model = "nobody"')
    with pytest.raises(SettingsError, match="mcp.search_model"):
        load({"home": tmp_path / "home", "config": config}, {})
    config.write_text('[mcp]\nscan_model = "nobody"')
    with pytest.raises(SettingsError, match="mcp.scan_model"):
        load({"home": tmp_path / "home", "config": config}, {})
