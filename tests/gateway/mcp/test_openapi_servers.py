"""An HTTP API behind a worker as it runs, of which its own OpenAPI document is all that is known:
approved, called with the tenant's credential by the official client, billed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import sqlalchemy as sa
from mcp import Client
from mcp.shared.exceptions import MCPError

from gateway.cli.mcp.offers import offered, server_of
from gateway.db import tenant
from gateway.mcp.admin.pins_admin import compared
from gateway.mcp.known import announce
from gateway.mcp.pins import approve_changes, read_pins
from gateway.settings.load import Settings, load
from tests.databases import Databases
from tests.gateway.mcp.shop import Shop, selling
from tests.gateway.routes.openapi.fresh import fresh_worker, mcp_client
from tests.gateway.routes.openapi.running import ACTOR, TIMEOUT_S, Running
from tests.mcp_bridge.counting import counting

CONFIG = """
[[mcp.servers]]
name = "shop"
openapi = "API/schema/openapi.json"
url = "API"
network = "loopback"
credential = "tenant"

[[mcp.servers]]
name = "counted"
url = "COUNTED"
network = "loopback"
trust = "all"

[[mcp.servers]]
name = "hostile"
openapi = "FOLDER/hostile.json"
url = "API"
network = "loopback"
trust = "all"
"""
CALLED = "SELECT finish, tool_call FROM usage_events WHERE model = 'mcp/shop'"
RECORDED = "SELECT * FROM audit_entries WHERE action = 'mcp.called'"
HOSTILE = {"openapi": "3.1.0", "paths": {"/x": {"$ref": "http://169.254.169.254/latest"}}}


class World(msgspec.Struct, frozen=True):
    worker: Running
    shop: Shop
    settings: Settings


@pytest.fixture(scope="module")
def world(
    databases: Databases, redis_server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    folder: Path = tmp_path_factory.mktemp("shop")
    (folder / "hostile.json").write_text(json.dumps(HOSTILE))
    with selling() as shop, counting() as counted:
        more = CONFIG.replace("API", shop.url).replace("FOLDER", str(folder))
        more = more.replace("COUNTED", counted.url)
        given = {"more": more}
        with fresh_worker(databases, redis_server_url, folder, **given) as worker:
            settings = load({"home": folder / "home", "config": folder / "tollgate.toml"}, {})
            yield World(worker, shop, settings)


@asynccontextmanager
async def client_of(world: World, mode: Any = "auto") -> AsyncIterator[Client]:
    async with mcp_client(world.worker, world.worker.everything, mode) as client:
        yield client


async def names_of(client: Client) -> set[str]:
    found: set[str] = set()
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        found |= {tool.name for tool in page.tools}
        if page.next_cursor is None:
            return found
        cursor = page.next_cursor


async def approve_all(world: World) -> None:
    """Do what `tollgate mcp approve shop --all` does."""
    services, org_id = world.worker.services, world.worker.org_id
    config = server_of(world.settings, "shop")
    offer = await offered(world.settings, config, org_id, services.system_db, services.redis)
    async with tenant(services.db, org_id) as conn:
        approved = await read_pins(conn, org_id=org_id, server="shop")
        changes = list(compared(config, approved, offer).waits)
        await approve_changes(conn, org_id=org_id, server="shop", pin_changes=changes, actor=ACTOR)
    await announce(services.redis, org_id)


async def until_shown(world: World) -> None:
    """Wait until every worker knows what was announced: a second at most."""
    async with client_of(world) as client, asyncio.timeout(TIMEOUT_S):
        while "shop__order" not in await names_of(client):
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def approved(world: World) -> World:
    """Before that nothing of it is shown."""

    async def shown() -> set[str]:
        async with client_of(world) as client:
            return await names_of(client)

    assert not {name for name in asyncio.run(shown()) if name.startswith("shop")}
    assert world.shop.seen == []
    world.worker.run(approve_all(world))
    asyncio.run(until_shown(world))
    put = world.worker.session.put(
        f"{world.worker.url}/v1/mcp/tenant_credentials/shop",
        json={"values": {"Authorization": "Bearer of-the-shop"}},
        headers={"authorization": f"Bearer {world.worker.everything}"},
        timeout=TIMEOUT_S,
    )
    assert put.ok, put.text
    return world


@pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")
@pytest.mark.parametrize("mode", ["legacy", "auto"])
def test_operations_are_tools_of_clients_of_either_era(approved: World, mode: str) -> None:
    """Called with the tenant's credential; of the caller's own token nothing arrives."""
    seen = approved.shop.seen
    seen.clear()

    async def calls() -> list[Any]:
        async with client_of(approved, mode) as client:
            assert {"shop__look_up", "shop__order"} <= await names_of(client)
            return [
                await client.call_tool("shop__look_up", {"item": "a&b ?", "most": 7}),
                await client.call_tool("shop__order", {"body": {"item": "tea", "count": 2}}),
                await client.call_tool("shop__order", {"body": {"item": "tea"}}),
                await client.call_tool("shop__look_up", {"item": "x", "most": "many"}),
            ]

    looked, ordered, incomplete, wrong = asyncio.run(calls())
    assert ordered.structured_content == {"item": "tea", "count": 2} and not ordered.is_error
    assert incomplete.is_error and wrong.is_error
    asked = [("a&b ? 7", "Bearer of-the-shop"), ("order tea", "Bearer of-the-shop")]
    assert looked.structured_content == {"item": "a&b ?", "count": 7} and seen == asked


def test_calls_are_billed_and_recorded(approved: World) -> None:
    """As those of every server: each once, and the credential nowhere."""
    worker = approved.worker

    async def call() -> None:
        async with client_of(approved) as client:
            await client.call_tool("shop__order", {"body": {"item": "counted", "count": 2}})

    async def read(statement: str) -> list[Any]:
        async with worker.services.system_db.connect() as conn:
            return list((await conn.execute(sa.text(statement))).all())

    async def work() -> tuple[list[Any], list[Any]]:
        async with asyncio.timeout(TIMEOUT_S):
            while not (done := await read(CALLED)) or not (told := await read(RECORDED)):
                await asyncio.sleep(0.05)
            return done, told

    before = len(approved.shop.seen)
    asyncio.run(call())
    billed, recorded = worker.run(work())
    assert len(approved.shop.seen) == before + 1
    assert {tuple(row) for row in billed} == {("done", 1)}
    assert "of-the-shop" not in str(recorded) and "counted" not in str(recorded)


def test_a_hostile_document_is_refused_by_name(world: World) -> None:
    """For clients in a word, for the operator with the place. Others go on."""

    async def call() -> Any:
        async with client_of(world) as client:
            names = await names_of(client)
            assert "counted__look" in names and not any(
                each.startswith("hostile") for each in names
            )
            with pytest.raises(MCPError) as found:
                await client.call_tool("hostile__x", {})
            return found.value.error

    error = asyncio.run(call())
    assert error.data == {"server": "hostile", "reason": "openapi_document_refused"}
    config = server_of(world.settings, "hostile")
    with pytest.raises(click.ClickException) as said:
        services = world.worker.services
        databases = services.system_db, services.redis
        asyncio.run(offered(world.settings, config, world.worker.org_id, *databases))
    assert "openapi_document_refused" in said.value.message
    assert "/paths/~1x: $ref must be" in said.value.message
