"""The wall from outside, with bodies that are good: an admin of another org sends every change of
`changing`, made for a thing of ours, and gets a 404 as if there were none.

`test_tenant_routes` asks every route there is; what stops there at the body, comes to the lookup
here, which the owner's success with the same words shows.
"""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from litestar.routes import HTTPRoute

from gateway.audit.tables import entries
from gateway.ids import uuid7
from gateway.routes.shared.access import SCOPE
from tests.gateway.routes.admin.changing import ADMIN, ORG, RECIPES, Maker
from tests.gateway.routes.admin.conftest import World
from tests.shared_application import on_one_loop


@pytest.fixture
def maker(world: World, org_id: str, project_id: str) -> Maker:
    return Maker(world, org_id, project_id)


@on_one_loop()
async def mallory(world: World) -> str:
    """An admin key of another org."""
    made = await world.call("POST", f"{ADMIN}/orgs", {"name": f"mallory-{uuid7().hex}"})
    key: str = made.json()["admin_key"]["value"]
    return key


def of_tenants(world: World) -> list[tuple[str, str]]:
    """The changes of RECIPES that name something of a tenant in their path."""
    scopes = {
        (str(method), route.path_format): str(handler.opt.get(SCOPE))
        for route in world.app.routes
        if isinstance(route, HTTPRoute)
        for handler in route.route_handlers
        for method in handler.http_methods
    }
    return [
        (method, path)
        for method, path in sorted(RECIPES)
        if "{" in path and not scopes[method, path].startswith("operator:")
    ]


async def recorded(world: World) -> int:
    async with world.db.connect() as conn:
        return int(await conn.scalar(sa.select(sa.func.count()).select_from(entries)) or 0)


async def test_what_is_another_tenants_is_not_there(
    world: World, maker: Maker, mallory: str
) -> None:
    failed = []
    changes = of_tenants(world)
    assert len(changes) > 20
    for method, path in changes:
        change = await RECIPES[method, path](maker)
        before = await recorded(world)
        theirs = await world.call(method, change.path, change.body, key=mallory)
        if theirs.status_code != 404 or await recorded(world) != before:
            failed.append(f"{method} {path}: {theirs.status_code} {theirs.text}")
        ours = await world.call(method, change.path, change.body)
        if not ours.is_success:
            failed.append(f"{method} {path}, of its owner: {ours.status_code} {ours.text}")
    assert not failed, "\n".join(failed)


async def test_nor_may_a_body_name_it(world: World, maker: Maker, mallory: str) -> None:
    project, user = await maker.project(), await maker.user()
    account = (await maker.account()).rpartition("/")[2]
    project_id = project.rpartition("/")[2]
    own = await world.call("POST", f"{ORG}/projects", {"name": "own"}, key=mallory)
    own_id = own.json()["id"]
    key, client = {"name": "k"}, maker.client_body()
    members = f"{ORG}/projects/{own_id}/users"
    named: list[tuple[str, dict[str, Any]]] = [
        (f"{ADMIN}/keys", {**key, "project_id": project_id}),
        (f"{ADMIN}/keys", {**key, "project_id": own_id, "user_id": user}),
        (f"{ADMIN}/keys", {**key, "project_id": own_id, "service_account_id": account}),
        (f"{ADMIN}/issuers", maker.issuer_body() | {"project_id": project_id}),
        (f"{ADMIN}/oauth/clients", {**client, "project_id": project_id}),
        (f"{ADMIN}/oauth/clients", {**client, "service_account_id": account}),
        (members, {"user_id": user, "role": "member"}),
    ]
    for at in (f"{ADMIN}/invites", f"{ORG}/invites"):
        role = "developer" if at.startswith(ADMIN) else "reader"
        projects = [{"id": project_id, "role": "member"}]
        named.append((at, {"email": maker.email(), "role": role, "projects": projects}))
    before = await recorded(world)
    for path, body in named:
        theirs = await world.call("POST", path, body, key=mallory)
        assert theirs.status_code == 404, f"{path} {body}: {theirs.status_code} {theirs.text}"
    assert await recorded(world) == before
    for path, body in named:
        if path != members:
            ours = {name: value if value != own_id else project_id for name, value in body.items()}
            done = await world.call("POST", path, ours)
            assert done.is_success, f"{path} {ours}, of its owner: {done.status_code} {done.text}"
    found = await world.call("GET", f"{ADMIN}/keys?project_id={project_id}", key=mallory)
    assert found.json()["data"] == []
