"""An org's approvals of a server are taken back to the last one: by the API and by the command
line, seen by the official client and by the server itself."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import sqlalchemy as sa
from click.testing import CliRunner, Result
from mcp import Client
from mcp.shared.exceptions import MCPError

from gateway.cli.main import tollgate
from gateway.mcp.admin import pins_admin
from gateway.mcp.known import announce
from tests.databases import Databases
from tests.gateway.routes.openapi.fresh import fresh_worker, mcp_client
from tests.gateway.routes.openapi.running import TIMEOUT_S, Running
from tests.mcp_bridge.counting import Counting, counting

CONFIG = """
[[mcp.servers]]
name = "pinned"
url = "URL"
network = "loopback"

[[mcp.servers]]
name = "other"
url = "OTHER"
network = "loopback"
trust = "all"
taints = true
"""
HIDDEN = "".join(chr(0xE0000 + ord(letter)) for letter in "obey")
"""Invisible characters that the scan takes for an attack: `all` leaves such an item out."""
PROMPTS = [{"name": "plain"}, {"name": "odd", "description": f"Read.{HIDDEN}"}]


class World(msgspec.Struct, frozen=True):
    worker: Running
    server: Counting
    folder: Path
    database: str
    redis: str

    def ask(self, verb: str, body: dict[str, Any]) -> Any:
        return self.worker.session.post(
            f"{self.worker.url}/v1/admin/mcp/servers/pinned/{verb}",
            json=body,
            headers={"authorization": f"Bearer {self.worker.everything}"},
            timeout=TIMEOUT_S,
        )

    def approve(self, *arguments: str) -> Result:
        return self.command("approve", "pinned", *arguments)

    def command(self, *arguments: str) -> Result:
        """By the command line."""
        config, home = self.folder / "tollgate.toml", self.folder / "home"
        where = ["--home", str(home), "--config", str(config), "--project", "web"]
        stores = {"TOLLGATE_DATABASE_URL": self.database, "TOLLGATE_REDIS_URL": self.redis}
        words = ["mcp", *arguments, *where]
        return CliRunner().invoke(tollgate, words, env=stores)

    def until(self, shown: set[str]) -> None:
        """Wait until every worker knows what was announced: a second at most."""
        end = time.monotonic() + TIMEOUT_S
        while (found := asyncio.run(self.shown())) != shown:
            assert time.monotonic() < end, found
            time.sleep(0.05)

    async def shown(self) -> set[str]:
        async with mcp_client(self.worker, self.worker.everything) as client:
            return await names_of(client)


async def names_of(client: Client) -> set[str]:
    tools = (await client.list_tools()).tools
    prompts = (await client.list_prompts()).prompts
    resources = (await client.list_resources()).resources
    found = {each.name for each in (*tools, *prompts, *resources)}
    return {name.removeprefix("pinned__") for name in found if not name.startswith("other__")}


@pytest.fixture(scope="module")
def world(
    databases: Databases, redis_server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    folder: Path = tmp_path_factory.mktemp("pins")
    with counting() as server, counting() as other:
        server.tools = server.tools[:1]
        server.prompts, server.instructions = PROMPTS, f"Use it.{HIDDEN}"
        server.resources = [{"name": "page", "uri": "x://page"}]
        more = CONFIG.replace("URL", server.url).replace("OTHER", other.url)
        given = {"more": more}
        with fresh_worker(databases, redis_server_url, folder, **given) as worker:
            database = worker.services.system_db.url.render_as_string(hide_password=False)
            yield World(worker, server, folder, database, redis_server_url)


def refused(world: World, verb: str, body: dict[str, Any]) -> tuple[int, str]:
    answer = world.ask(verb, body)
    return answer.status_code, answer.json()["param"]


def test_what_waits_is_turned_page_by_page(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is asked for the first page alone, and every page is of one offer, which is
    compared once with what is approved, and anew when that has changed."""
    compared, comparisons = pins_admin.compared, list[str]()

    def noting(config: Any, *others: Any) -> Any:
        comparisons.append(config.name)
        return compared(config, *others)

    monkeypatch.setattr(pins_admin, "compared", noting)

    def page(**query: Any) -> Any:
        return world.worker.session.get(
            f"{world.worker.url}/v1/admin/mcp/servers/pinned",
            params=query,
            headers={"authorization": f"Bearer {world.worker.everything}"},
            timeout=TIMEOUT_S,
        )

    services = world.worker.services
    assert services.mcp is not None
    feed = services.mcp.pins._feed
    before = feed.changes
    whole = page()
    assert whole.json()["waiting"] == len(whole.json()["changes"]) == 5
    first = page(limit=2)
    asked, names, found = len(world.server.asked), [], first
    while True:
        assert found.headers["etag"] == whole.headers["etag"]
        names += [(change["kind"], change["name"]) for change in found.json()["changes"]]
        if found.json()["next"] is None:
            break
        found = page(limit=2, after=found.json()["next"])
    assert names == [(each["kind"], each["name"]) for each in whole.json()["changes"]]
    assert len(comparisons) <= 2 + feed.changes - before
    compared_once, end = len(comparisons), time.monotonic() + TIMEOUT_S
    world.worker.run(announce(services.redis, world.worker.org_id))
    while len(comparisons) == compared_once:
        assert page(limit=2, after=first.json()["next"]).headers["etag"] == whole.headers["etag"]
        assert time.monotonic() < end
    assert len(world.server.asked) == asked
    wrong = page(after="f" * 32)
    assert (wrong.status_code, wrong.json()["param"]) == (400, "after")
    assert page(limit=0).json()["param"] == "limit"


def test_all_that_was_approved_can_be_taken_back(world: World) -> None:
    for body in ({}, {"all": True, "prompts": ["odd"]}, {"all": True, "instructions": True}):
        assert refused(world, "approve", body) == refused(world, "revoke", body) == (400, "tools")
    assert refused(world, "approve", {"prompts": ["look"]}) == (400, "prompts")
    assert world.ask("approve", {"all": True}).json()["approved"] == 3  # `odd` and instructions not
    world.until({"look", "plain", "page"})
    named = world.ask("approve", {"prompts": ["odd"], "instructions": True}).json()
    assert (named["approved"], named["waiting"]) == (5, 0)
    assert refused(world, "approve", {"instructions": True}) == (400, "instructions")
    world.until({"look", "plain", "odd", "page"})

    assert world.ask("revoke", {"prompts": ["plain"], "instructions": True}).json()["approved"] == 3
    world.until({"look", "odd", "page"})
    assert world.ask("revoke", {"tools": ["look"], "prompts": ["odd"]}).json()["approved"] == 1
    world.until({"page"})
    left = world.ask("revoke", {"all": True}).json()
    assert (left["approved"], left["state"]) == (0, "unapproved")
    assert world.ask("revoke", {"all": True}).status_code == 404
    world.until(set())
    before = list(world.server.asked)
    assert asyncio.run(world.shown()) == set() and world.server.asked == before


def test_who_listens_is_told_what_was_decided(world: World) -> None:
    """A client that listens hears of a decision, whatever its revision of the protocol."""

    async def hears(mode: Literal["legacy", "auto"]) -> None:
        heard = asyncio.Event()

        async def hear(message: Any) -> None:
            if getattr(message, "method", "") == "notifications/tools/list_changed":
                heard.set()

        async def decide() -> None:
            """Until it is heard: a stream of the older era is opened behind the client's back."""
            while not heard.is_set():
                for verb in ("approve", "revoke"):
                    done = await asyncio.to_thread(world.ask, verb, {"all": True})
                    assert done.status_code == 200, done.text

        key = world.worker.everything
        async with mcp_client(world.worker, key, mode, message_handler=hear) as client:
            if mode == "legacy":
                await decide()
                return
            async with client.listen(tools_list_changed=True) as changes:
                deciding = asyncio.create_task(decide())
                assert type(await anext(changes)).__name__ == "ToolsListChanged"
                heard.set()
                await deciding

    for mode in ("legacy", "auto"):
        asyncio.run(hears(mode))


def test_a_key_without_a_user_is_told_that_it_has_none(world: World) -> None:
    answer = world.worker.session.get(
        f"{world.worker.url}/v1/mcp/credentials/pinned",
        headers={"authorization": f"Bearer {world.worker.everything}"},
        timeout=TIMEOUT_S,
    )
    assert answer.status_code == 403 and "Only a user who is signed in" in answer.text, answer.text


def test_the_command_line_does_the_same(world: World) -> None:
    assert "1 wait" not in (said := world.approve("--all")).output and said.exit_code == 0, said
    assert "3 approved." in said.output
    named = world.approve("--prompt", "odd", "--instructions")
    assert named.exit_code == 0 and "2 approved." in named.output, named.output
    unknown = world.approve("--prompt", "nobody")
    assert unknown.exit_code == 1 and "nobody: no prompt of that name waits" in unknown.output
    assert world.approve("--all", "--prompt", "odd").exit_code == 2
    assert world.approve("--revoke").exit_code == 2
    world.until({"look", "plain", "odd", "page"})
    assert "1 revoked." in world.approve("--revoke", "--instructions").output
    done = world.approve("--revoke", "--all")
    assert done.exit_code == 0 and "4 revoked." in done.output, done.output
    world.until(set())


def test_rules_are_shown_as_they_are_written(world: World, tmp_path: Path) -> None:
    file = tmp_path / "rules.json"
    asks = {"id": "asks", "effect": "ask", "tools": ["other__look"]}
    for content in ([asks], {"rules": [asks, {"id": "all", "effect": "allow"}]}):
        file.write_text(json.dumps(content))
        done = world.command("rules", str(file))
        assert done.exit_code == 0, done.output
    shown = json.loads(world.command("rules").output)
    assert {each["id"] for each in shown["rules"]} == {"asks", "all"}
    file.write_text(json.dumps(shown))
    assert shown["version"] in world.command("rules", str(file)).output
    file.write_text('{"rule": []}')
    assert world.command("rules", str(file)).exit_code == 1

    async def ask() -> None:
        async with mcp_client(world.worker, world.worker.everything) as client:
            end = time.monotonic() + TIMEOUT_S
            while time.monotonic() < end:
                try:
                    await client.call_tool("other__look", {})
                except MCPError:
                    return

    asyncio.run(ask())
    listed = world.command("calls").output
    assert all(word in listed for word in (" look ", " other ", " administrator ", "sha256"))
    file.write_text("[]")
    assert world.command("rules", str(file)).exit_code == 0


def test_a_taint_is_lifted_by_somebody_else(world: World) -> None:
    """By the API and by the command line; not by whoever is tainted."""
    worker = world.worker

    def ask(method: str, path: str) -> Any:
        headers = {"authorization": f"Bearer {worker.everything}"}
        url = f"{worker.url}/v1/admin/mcp/taints{path}"
        return worker.session.request(method, url, headers=headers, timeout=TIMEOUT_S)

    async def look(secret: str) -> None:
        async with mcp_client(worker, secret) as client:
            await client.call_tool("other__look", {"n": 1})

    def tainted() -> dict[str, Any]:
        return {each["client_id"]: each for each in ask("GET", "").json()["data"]}

    key = worker.run(worker.new_key(["mcp:call"]))
    asyncio.run(look(key))
    asyncio.run(look(worker.everything))
    own = worker.run(worker.services.authenticator.authenticate(worker.everything)).key_id
    [other] = tainted().keys() - {own}
    assert tainted()[other]["servers"] == ["other"]
    refused = ask("POST", f"/{own}/lift")
    assert (refused.status_code, refused.json()["param"]) == (403, "client_id")
    lifted = ask("POST", f"/{other}/lift")
    assert [each["client_id"] for each in lifted.json()["data"]] == [other]
    assert tainted().keys() == {own}
    missing = ask("POST", f"/{other}/lift")
    assert (missing.status_code, missing.json()["param"]) == (404, "client_id")

    assert own in world.command("taints").output
    done = world.command("taints", "--lift", own)
    assert done.exit_code == 0 and done.output == f"{own}: lifted of 1.\n"
    assert tainted() == {}
    entries = worker.run(lifted_in(worker))
    assert [(each.target, each.actor_id) for each in entries] == [(other, own), (own, "cli")]


async def lifted_in(worker: Running) -> list[Any]:
    query = (
        "SELECT target, actor_id FROM audit_entries WHERE org_id = :org"
        " AND action = 'mcp.taint_lifted' ORDER BY sequence"
    )
    async with worker.services.system_db.connect() as conn:
        return list((await conn.execute(sa.text(query), {"org": worker.org_id})).all())
