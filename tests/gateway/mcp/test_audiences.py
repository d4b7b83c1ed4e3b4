"""A server that is there for one tenant, or for one of its projects: for all others there is none
of that name, by every way that there is to ask."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import click
import msgspec
import pytest
from click.testing import CliRunner, Result

from gateway.audit.log import COMMAND_LINE
from gateway.cli.main import tollgate
from gateway.cli.mcp.adding import audience_of
from gateway.cli.shared.target import GatewayError
from gateway.db import tenant
from gateway.permissions import KEY_SCOPES
from gateway.settings.file import SettingsError
from gateway.settings.load import load
from gateway.tenancy import orgs, projects
from gateway.tenancy.errors import NotFound
from gateway.tenancy.keys.keys import create_key
from gateway.tenancy.members.users import create_user
from gateway.tenancy.orgs import create_org
from gateway.tenancy.projects import create_project
from mcp_bridge.upstream.audience import EVERYBODY, Audience
from tests.databases import Databases
from tests.gateway.routes.openapi.fresh import fresh_worker, mcp_client
from tests.gateway.routes.openapi.running import TIMEOUT_S, Running
from tests.mcp_bridge.counting import counting
from tests.mcp_bridge.processes import modern

ACME, OTHER = (UUID(int=number) for number in (1, 2))
WEB, APP, THEIRS = (UUID(int=number) for number in (3, 4, 5))
CONFIG = f"""
[[mcp.servers]]
name = "common"
url = "URL"
network = "loopback"
trust = "all"

[[mcp.servers]]
name = "acmes"
url = "URL"
network = "loopback"
trust = "all"
namespace = "acme"
orgs = ["org_{ACME.hex}"]
credential = "tenant"

[[mcp.servers]]
name = "webs"
url = "URL"
network = "loopback"
trust = "all"
namespace = "web"
projects = ["org_{ACME.hex}/proj_{WEB.hex}"]
credential = "user"

[[mcp.servers]]
name = "nobodys"
url = "URL"
network = "loopback"
trust = "all"
orgs = []
"""
SERVERS = "/v1/admin/mcp/servers"
REQUEST_ID = re.compile("req_[0-9a-f]{32}")
EVERYWHERE = ("ghost", "nobodys")
"""No such server, and one for nobody."""


class World(msgspec.Struct, frozen=True):
    worker: Running
    web: str
    app: str
    other: str
    folder: Path
    stores: dict[str, str]

    def ask(
        self, key: str, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, Any]:
        headers["authorization"] = f"Bearer {key}"
        answer = self.worker.session.request(
            method, self.worker.url + path, json=body, headers=headers, timeout=TIMEOUT_S
        )
        return answer.status_code, answer.json() if answer.content else None

    def names(self, key: str) -> set[str]:
        async def work() -> set[str]:
            async with mcp_client(self.worker, key) as client:
                return {one.name.partition("__")[0] for one in (await client.list_tools()).tools}

        return asyncio.run(work())

    def command(self, *arguments: str) -> Result:
        where = [
            "--home",
            str(self.folder / "home"),
            "--config",
            str(self.folder / "tollgate.toml"),
        ]
        return CliRunner().invoke(tollgate, ["mcp", *arguments, *where], env=self.stores)


async def tenants(worker: Running) -> list[str]:
    """Keys of two projects of one organization, and of one of another's: each is a user's."""
    found = worker.services
    pepper_id, pepper = found.authenticator.pepper
    keys: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, org, made in (("acme", ACME, (WEB, APP)), ("other", OTHER, (THEIRS,))):
            patch.setattr(orgs, "uuid7", lambda org=org: org)
            async with found.system_db.begin() as conn:
                await create_org(conn, name=name, actor=COMMAND_LINE)
            org_id = f"org_{org.hex}"
            async with tenant(found.db, org_id) as conn:
                user = await create_user(
                    conn,
                    org_id=org_id,
                    email=f"a@{name}.example",
                    name="A",
                    role="owner",
                    actor=COMMAND_LINE,
                )
                for each, named in zip(made, ("web", "app"), strict=False):
                    patch.setattr(projects, "uuid7", lambda each=each: each)
                    await create_project(conn, org_id=org_id, name=named, actor=COMMAND_LINE)
                    key = await create_key(
                        conn,
                        org_id=org_id,
                        project_id=f"proj_{each.hex}",
                        name="test",
                        scopes=sorted(KEY_SCOPES),
                        user_id=user.id,
                        pepper=pepper,
                        pepper_id=pepper_id,
                        actor=COMMAND_LINE,
                    )
                    keys.append(key.secret)
    return keys


@pytest.fixture(scope="module")
def world(
    databases: Databases, redis_server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    folder: Path = tmp_path_factory.mktemp("audiences")
    with counting() as server:
        more = CONFIG.replace("URL", server.url)
        with fresh_worker(databases, redis_server_url, folder, more=more) as worker:
            url = worker.services.system_db.url.render_as_string(hide_password=False)
            stores = {"TOLLGATE_DATABASE_URL": url, "TOLLGATE_REDIS_URL": redis_server_url}
            keys = worker.run(tenants(worker))
            yield World(worker, *keys, folder=folder, stores=stores)


def test_each_is_listed_what_is_there_for_them(world: World) -> None:
    assert world.names(world.web) == {"common", "acmes", "webs"}
    assert world.names(world.app) == {"common", "acmes"}
    assert world.names(world.other) == {"common"}


def ways(world: World, key: str, name: str, namespace: str) -> Iterator[tuple[int, Any]]:
    """All that there are to ask about a server."""
    rule = {"id": "r", "effect": "allow", "tools": [f"{name}__*"]}
    tool = {"type": "mcp", "server_label": name, "require_approval": "never"}
    credential = {"values": {"X-Key": "value-of-mine"}}
    (org, project) = {
        world.web: (ACME, WEB),
        world.app: (ACME, APP),
        world.other: (OTHER, THEIRS),
    }[key]
    place = f"/mcp/org_{org.hex}/proj_{project.hex}"
    message, headers = modern("tools/call", {"name": f"{name}__look", "arguments": {"n": 1}})
    for path in ("/mcp", f"{place}/{namespace}"):
        yield world.ask(key, "POST", path, message, **headers)
    yield world.ask(key, "POST", "/v1/responses", {"model": "far", "input": "x", "tools": [tool]})
    for method in ("PUT", "GET", "DELETE"):
        body = credential if method == "PUT" else None
        yield world.ask(key, method, f"/v1/mcp/credentials/{name}", body)
    yield from tenants_ways(world, key, name)
    status, found = world.ask(key, "PUT", "/v1/admin/mcp/rules", {"rules": [rule]})
    yield status, found["warnings"]
    assert world.ask(key, "PUT", "/v1/admin/mcp/rules", {"rules": []})[0] == 200


def tenants_ways(world: World, key: str, name: str) -> Iterator[tuple[int, Any]]:
    """Those of who sees to a whole organization."""
    for method in ("PUT", "GET", "DELETE"):
        body = {"values": {"X-Key": "value-of-ours"}} if method == "PUT" else None
        yield world.ask(key, method, f"/v1/mcp/tenant_credentials/{name}", body)
    yield world.ask(key, "GET", f"{SERVERS}/{name}")
    for verb in ("approve", "revoke"):
        yield world.ask(key, "POST", f"{SERVERS}/{name}/{verb}", {"all": True})


def told(found: Iterator[tuple[int, Any]], *names: str) -> list[str]:
    """As whoever asks reads it, whatever the name is."""
    said = [msgspec.json.encode(each).decode() for each in found]
    for name in names:
        said = [each.replace(name, "NAME") for each in said]
    return [REQUEST_ID.sub("req_", each) for each in said]


def test_for_others_it_is_as_one_that_does_not_exist(world: World) -> None:
    ghost = told(ways(world, world.other, "ghost", "ghost"), "ghost")
    for name, namespace in (("acmes", "acme"), ("webs", "web"), ("nobodys", "ghost")):
        found = told(ways(world, world.other, name, namespace), name)
        assert found == ghost, name
    assert [each[1:4] for each in ghost] == ["400", "404", "400", *["404"] * 9, "200"]


def test_for_another_project_of_its_organization_too(world: World) -> None:
    """But for who sees to all of them."""
    ghost = told(ways(world, world.app, "ghost", "ghost"), "ghost")
    found = told(ways(world, world.app, "webs", "web"), "webs")
    by_all = len(list(tenants_ways(world, world.app, "ghost"))) + 1
    assert found[:-by_all] == ghost[:-by_all]
    theirs = [status for status, _ in ways(world, world.web, "webs", "web")]
    assert theirs == [200] * 11 + [404, 200], "it is there, and nothing of it was approved"


def test_who_administers_sees_their_own(world: World) -> None:
    def listed(key: str) -> set[str]:
        return {each["name"] for each in world.ask(key, "GET", SERVERS)[1]["data"]}

    assert listed(world.app) == {"common", "acmes", "webs", "shown"}
    assert listed(world.other) == {"common", "shown"}
    sign_ins = world.worker.services.mcp.vault.sign_ins  # type: ignore[union-attr]
    assert sign_ins.is_for_tenant(f"org_{ACME.hex}", "acmes", None)
    for server in ("acmes", "webs", *EVERYWHERE):
        with pytest.raises(NotFound, match="nobody signs in at a server of that name"):
            sign_ins.is_for_tenant(f"org_{OTHER.hex}", server, "tenant")


def test_the_command_line_finds_whom_it_is_for(world: World) -> None:
    listed = world.command("list", "--org", "other", "--project", "web", "--json")
    assert {msgspec.json.decode(line)["server"] for line in listed.stdout.splitlines()} == {
        "common",
        "shown",
    }
    refused = world.command("diff", "acmes", "--org", "other", "--project", "web")
    assert refused.exit_code == 1 and "is not there for" in refused.output
    flags = {"home": world.folder / "home", "config": world.folder / "tollgate.toml"}
    settings = load(flags, world.stores)

    def audience(*orgs: str, project: str) -> dict[str, list[str]]:
        nobody: Any = None  # whom only organizations are asked of
        return asyncio.run(audience_of(nobody, settings, orgs, (project,)))

    assert audience("acme", project="web") == {"projects": [f"org_{ACME.hex}/proj_{WEB.hex}"]}
    for org, project in (("nobody", "web"), ("other", "app")):
        with pytest.raises(GatewayError):
            audience(org, project=project)
    with pytest.raises(click.UsageError):
        audience("acme", "other", project="web")


def test_whom_it_is_for_is_written_by_ids(tmp_path: Path) -> None:
    config = tmp_path / "tollgate.toml"
    server = '[[mcp.servers]]\nname = "a"\nurl = "https://h.example/mcp"\n'
    for line, field in (('orgs = ["acme"]', "orgs"), ('projects = ["proj_1"]', "projects")):
        config.write_text(server + line)
        with pytest.raises(SettingsError, match=rf"mcp.servers\[0\].{field}\[0\]: .*id, org_"):
            load({"config": config}, {})


def test_an_audience_without_anybody_is_nobody() -> None:
    assert EVERYBODY.has("org_a", "proj_a") and EVERYBODY.has("org_a", None)
    for nobody in (Audience(orgs=frozenset()), Audience(projects=frozenset())):
        assert not nobody.has("org_a", "proj_a") and not nobody.has("org_a", None)
    some = Audience(projects=frozenset({("org_a", "proj_a")}))
    assert some.has("org_a", "proj_a") and some.has("org_a", None)
    assert (
        not some.has("org_b", "proj_a")
        and not some.has("org_a", "")
        and not some.has("org_b", None)
    )
