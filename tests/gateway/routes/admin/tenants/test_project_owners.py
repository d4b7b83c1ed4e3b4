"""Checks that the owner of a project runs it, whatever their role in the org, and runs nothing
else."""

from __future__ import annotations

from typing import Any

from litestar.routes import HTTPRoute

from gateway.routes.shared.access import IN_PROJECT
from tests.gateway.routes.admin.conftest import World
from tests.gateway.routes.admin.tenants.test_admin_tenant import key_of, make_user
from tests.shared_application import on_one_loop

PROJECTS = "/v1/organization/projects"
SCOPES = ["admin:projects", "admin:members", "admin:keys", "admin:billing", "admin:read"]


@on_one_loop()
async def reader(world: World, org_id: str) -> str:
    return await make_user(world, org_id, "reader")


@on_one_loop()
async def key(world: World, project_id: str, reader: str) -> str:
    """Make a key of an owner of the project who may only read the rest of the org."""
    await world.sdk.admin.organization.projects.users.create(
        project_id, user_id=reader, role="owner"
    )
    return await key_of(world, project_id, reader, SCOPES)


async def ok(world: World, key: str, method: str, path: str, body: Any = None) -> Any:
    answer = await world.call(method, path, body, key=key)
    assert answer.is_success, f"{method} {path}: {answer.text}"
    return answer.json()


async def test_an_owner_runs_the_project(
    world: World, org_id: str, project_id: str, key: str
) -> None:
    here = f"{PROJECTS}/{project_id}"
    other = await make_user(world, org_id, "developer", "bob")
    body = {"user_id": other, "role": "member"}
    await ok(world, key, "POST", f"{here}/users", body)
    await ok(world, key, "POST", f"{here}/users/{other}", {"role": "owner"})
    await ok(world, key, "DELETE", f"{here}/users/{other}")
    account = await ok(world, key, "POST", f"{here}/service_accounts", {"name": "ci"})
    one = f"{here}/service_accounts/{account['id']}"
    made = await ok(world, key, "POST", f"{one}/api_keys", {})
    await ok(world, key, "POST", f"{here}/api_keys/{made['id']}", {"expires_in_seconds": 60})
    await ok(world, key, "DELETE", f"{here}/api_keys/{made['id']}")
    await ok(world, key, "DELETE", one)
    limit = {"max_requests_per_1_minute": 5}
    await ok(world, key, "POST", f"{here}/rate_limits/rl-far", limit)


async def test_and_nothing_else(world: World, org_id: str, project_id: str, key: str) -> None:
    second = (await world.sdk.admin.organization.projects.create(name="two")).id
    bob = await make_user(world, org_id, "developer", "bob")
    for route in world.app.routes:
        if not isinstance(route, HTTPRoute):
            continue
        for handler in route.route_handlers:
            if IN_PROJECT not in handler.opt:
                continue
            path = route.path_format.replace("{project_id}", second)
            for method in handler.http_methods:
                refused = await world.call(str(method), path, {}, key=key)
                assert refused.status_code == 403, f"{method} {path}: {refused.text}"
    here = f"{PROJECTS}/{project_id}"
    calls: tuple[tuple[str, str, Any], ...] = (
        ("POST", here, {"name": "mine"}),
        ("POST", f"{here}/archive", None),
        ("POST", f"{here}/model_permissions", {"mode": "deny_list", "model_ids": []}),
        ("PATCH", f"/v1/admin/projects/{project_id}", {"plan": "gold"}),
        ("POST", PROJECTS, {"name": "three"}),
        ("POST", f"/v1/organization/users/{bob}", {"role": "reader"}),
        ("POST", "/v1/organization/invites", {"email": "a@b.example", "role": "reader"}),
        ("POST", "/v1/admin/keys", {"name": "k", "project_id": project_id}),
    )
    for method, path, body in calls:
        refused = await world.call(method, path, body, key=key)
        assert refused.status_code == 403, f"{method} {path}: {refused.text}"


async def test_who_owns_it_no_more_runs_it_no_more(
    world: World, project_id: str, reader: str, key: str
) -> None:
    path = f"{PROJECTS}/{project_id}/rate_limits/rl-far"
    body = {"max_requests_per_1_minute": 5}
    await ok(world, key, "POST", path, body)
    members = world.sdk.admin.organization.projects.users
    await members.update(reader, project_id=project_id, role="member")
    for _ in range(100):
        if (await world.call("POST", path, body, key=key)).status_code == 403:
            break
    else:
        raise AssertionError("a member still sets limits")


async def test_no_more_is_given_away_than_one_has(world: World, project_id: str, key: str) -> None:
    here = f"{PROJECTS}/{project_id}"
    account = await ok(world, key, "POST", f"{here}/service_accounts", {"name": "ci"})
    keys = f"{here}/service_accounts/{account['id']}/api_keys"
    refused = await world.call("POST", keys, {"scopes": ["admin:keys"]}, key=key)
    assert refused.status_code == 400, "a project's key is for its models"
