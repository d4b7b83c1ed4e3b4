"""Over HTTP: what an admin made goes when they go, and what a bound key makes is bound as it is.
The rules by themselves are in `auth/test_delegation.py`."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tests.gateway.routes.admin.conftest import World
from tests.gateway.routes.admin.tenants.test_admin_tenant import key_of, make_user
from tests.pace import within
from tests.shared_application import on_one_loop

KEYS, CLIENTS = "/v1/admin/keys", "/v1/admin/oauth/clients"
ADMIN = ["admin:keys", "admin:read", "admin:members", "admin:clients", "admin:projects"]
ROBOT = {"client_name": "robot", "grant_types": ["client_credentials"]}


async def made(world: World, path: str, body: Any, key: str) -> dict[str, Any]:
    answer = await world.call("POST", path, body, key=key)
    assert answer.is_success, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def refused(world: World, method: str, path: str, body: Any, key: str) -> str:
    answer = await world.call(method, path, body, key=key)
    assert answer.status_code == 403, f"{method} {path}: {answer.status_code} {answer.text}"
    return str((answer.json().get("error") or answer.json())["param"])


async def until(world: World, key: str, status: int) -> None:
    async with within(1.0):
        while (await world.call("GET", "/v1/admin/keys", key=key)).status_code != status:
            await asyncio.sleep(0.01)


async def test_a_removed_admin_keeps_nothing_that_administers(
    world: World, org_id: str, project_id: str
) -> None:
    user = await make_user(world, org_id, "admin")
    first = await key_of(world, project_id, user, ADMIN)
    body = {"name": "door", "project_id": project_id, "scopes": ADMIN}
    second = await made(world, KEYS, body, first)
    assert second["owner"] == {"type": "user", "id": user}
    third = await made(world, KEYS, {**body, "user_id": user}, second["value"])
    other = await make_user(world, org_id, "owner", "bob")
    assert await refused(world, "POST", KEYS, {**body, "user_id": other}, first) == "user_id"
    account = f"/v1/organization/projects/{project_id}/service_accounts"
    account_id = (await world.call("POST", account, {"name": "ci"})).json()["id"]
    of_account = {**body, "service_account_id": account_id}
    assert await refused(world, "POST", KEYS, of_account, first) == "user_id"
    loose = await made(world, KEYS, body, world.admin_key)
    assert loose["owner"] is None, "who is nobody makes what is nobody's"
    one = f"{KEYS}/{loose['id']}"
    assert await refused(world, "POST", one + "/rotate", None, first) == "scopes"
    narrow = {"scopes": ["admin:read"]}
    assert (await world.call("PATCH", one, narrow, key=first)).status_code == 200
    assert await refused(world, "PATCH", one, {"scopes": ADMIN}, first) == "scopes"
    project_key = await made(world, KEYS, {"name": "k", "project_id": project_id}, first)
    assert project_key["owner"] is None, "what is for inference is the project's"
    for key in (first, second["value"], third["value"]):
        await until(world, key, 200)
    gone = await world.call("DELETE", f"/v1/organization/users/{user}")
    assert gone.status_code == 200, gone.text
    for key in (first, second["value"], third["value"]):
        await until(world, key, 401)
    assert (await world.call("GET", "/v1/models", key=project_key["value"])).status_code == 200


async def test_a_demoted_admins_keys_are_demoted_with_them(
    world: World, org_id: str, project_id: str
) -> None:
    user = await make_user(world, org_id, "admin")
    first = await key_of(world, project_id, user, ADMIN)
    body = {"name": "door", "project_id": project_id, "scopes": ADMIN}
    second = (await made(world, KEYS, body, first))["value"]
    members = f"/v1/organization/projects/{project_id}/users"
    await made(world, members, {"user_id": user, "role": "member"}, world.admin_key)
    assert (await world.call("PATCH", f"/v1/admin/users/{user}", {"role": "reader"})).is_success
    async with within(1.0):
        while (await world.call("POST", KEYS, body, key=second)).status_code != 403:
            await asyncio.sleep(0.01)


async def test_nor_a_client_that_would_come_alone(
    world: World, org_id: str, project_id: str
) -> None:
    user = await make_user(world, org_id, "admin")
    mine = await key_of(world, project_id, user, ADMIN)
    robot = {**ROBOT, "project_id": project_id, "scopes": ["admin:members"]}
    assert await refused(world, "POST", CLIENTS, robot, mine) == "service_account_id"
    known = await made(world, CLIENTS, robot, world.admin_key)
    one = f"{CLIENTS}/{known['id']}"
    assert await refused(world, "POST", one + "/rotate-secret", {}, mine) == "service_account_id"
    assert await refused(world, "POST", one, robot, mine) == "service_account_id"
    plain = {**robot, "scopes": ["inference"]}
    quiet = await made(world, CLIENTS, plain, mine)
    widened = f"{CLIENTS}/{quiet['id']}"
    assert await refused(world, "POST", widened, robot, mine) == "service_account_id"
    # Nor is a client's secret anybody's who has not its scopes.
    whole = await made(world, CLIENTS, {**robot, "scopes": ["admin:*"]}, world.admin_key)
    path = f"{CLIENTS}/{whole['id']}/rotate-secret"
    assert (await world.call("POST", path, {}, key=mine)).status_code == 403
    # A client's own token makes nothing that would outlive the client.
    got = await world.http.post(
        "/oauth/token",
        auth=(whole["id"], whole["client_secret"]),
        data={"grant_type": "client_credentials"},
    )
    token = got.json()["access_token"]
    admin_keys = "/v1/organization/admin_api_keys"
    assert await refused(world, "POST", admin_keys, {"name": "door"}, token) == "scopes"
    body = {"name": "door", "project_id": project_id, "scopes": ["admin:read"]}
    assert await refused(world, "POST", KEYS, body, token) == "scopes"
    assert await refused(world, "POST", CLIENTS, robot, token) == "service_account_id"


@on_one_loop()
async def bound(world: World, project_id: str) -> dict[str, Any]:
    body = {
        "name": "bound",
        "project_id": project_id,
        "scopes": ["admin:*"],
        "ip_ranges": ["127.0.0.0/8"],
        "models": ["far"],
        "expires_at": int(time.time()) + 600,
    }
    return await made(world, KEYS, body, world.admin_key)


async def test_what_a_bound_key_makes_is_bound_as_it_is(
    world: World, project_id: str, bound: dict[str, Any]
) -> None:
    key, body = bound["value"], {"name": "k", "project_id": project_id}
    same = ("ip_ranges", "models", "expires_at")
    inherits = await made(world, KEYS, {**body, "scopes": ["admin:keys"]}, key)
    assert [inherits[name] for name in same] == [bound[name] for name in same]
    for field, beyond in (
        ("ip_ranges", ["10.0.0.0/8"]),
        ("models", ["far", "near"]),
        ("expires_at", bound["expires_at"] + 1),
    ):
        assert await refused(world, "POST", KEYS, {**body, field: beyond}, key) == field
        path = f"{KEYS}/{inherits['id']}"
        assert await refused(world, "PATCH", path, {field: None}, key) == field
    fewer = await made(world, KEYS, {**body, "ip_ranges": ["127.0.0.1"]}, key)
    assert fewer["ip_ranges"] == ["127.0.0.1/32"]
    admin = await made(world, "/v1/organization/admin_api_keys", {"name": "a"}, key)
    shown = (await world.call("GET", f"{KEYS}/{admin['id']}")).json()
    assert [shown[name] for name in same] == [bound[name] for name in same]
    accounts = f"/v1/organization/projects/{project_id}/service_accounts"
    machine = (await made(world, accounts, {"name": "ci"}, key))["api_key"]["id"]
    shown = (await world.call("GET", f"{KEYS}/{machine}")).json()
    assert [shown[name] for name in same] == [bound[name] for name in same]


async def test_a_bound_key_lifts_nothing_and_lets_nobody_in(
    world: World, org_id: str, project_id: str, bound: dict[str, Any]
) -> None:
    key, project = bound["value"], f"/v1/organization/projects/{project_id}"
    itself = f"{KEYS}/{bound['id']}"
    for change in ({"ip_ranges": None, "expires_at": None}, {"name": "x"}, {"models": ["far"]}):
        assert await refused(world, "PATCH", itself, change, key) == "key_id"
    other = await made(world, KEYS, {"name": "k", "project_id": project_id}, world.admin_key)
    free = f"{KEYS}/{other['id']}"
    assert await refused(world, "POST", free + "/rotate", None, key) == "ip_ranges"
    assert await refused(world, "PATCH", free, {"name": "mine"}, key) == "ip_ranges"
    by_openai = f"{project}/api_keys/{other['id']}"
    assert await refused(world, "POST", by_openai, {"expires_in_seconds": 60}, key) == "ip_ranges"
    robot = {**ROBOT, "project_id": project_id, "scopes": ["inference"]}
    assert await refused(world, "POST", CLIENTS, robot, key) == "grant_types"
    user = await make_user(world, org_id, "reader")
    account = (await world.call("POST", f"{project}/service_accounts", {"name": "ci"})).json()["id"]
    someone = {"email": "door@x.example", "role": "reader"}
    member = {"user_id": user, "role": "owner"}
    for method, path, body in (
        ("POST", "/v1/admin/invites", someone),
        ("POST", "/v1/organization/invites", someone),
        ("PATCH", f"/v1/admin/users/{user}", {"role": "admin"}),
        ("POST", f"{project}/users", member),
        ("POST", f"{project}/service_accounts/{account}", {"role": "owner"}),
        ("POST", "/v1/admin/orgs", {"name": "door"}),
    ):
        assert await refused(world, method, path, body, key) == "role", path
    assert (await world.call("POST", f"{project}/users", member)).is_success
    one = f"{project}/users/{user}"
    assert await refused(world, "POST", one, {"role": "member"}, key) == "role"
    # It may still go on by itself, and end what there is.
    fresh = await made(world, itself + "/rotate", {"grace_s": 60}, key)
    assert fresh["expires_at"] == bound["expires_at"]
    authenticate = world.services.authenticator.authenticate
    async with within(1.0):
        while (await authenticate(key)).expires_at == bound["expires_at"]:
            await asyncio.sleep(0.01)
    assert await refused(world, "POST", itself + "/rotate", None, key) == "expires_at", (
        "a secret that was rotated away would be as good as new"
    )
    assert (await world.call("POST", free + "/revoke", key=fresh["value"])).status_code == 200
