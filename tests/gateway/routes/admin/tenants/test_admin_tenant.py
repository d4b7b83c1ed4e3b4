"""Checks what an org changes of itself beyond OpenAI's calls: origins, plans of projects, roles."""

from __future__ import annotations

import pytest

from gateway.audit.log import COMMAND_LINE
from gateway.db import tenant
from gateway.tenancy.members import users
from tests.gateway.routes.admin.conftest import World

ORGANIZATION = "/v1/admin/organization"
PROJECTS = "/v1/admin/projects"
INVITES = "/v1/admin/invites"
PAGE = "https://app.example"


async def make_user(world: World, org_id: str, role: str, name: str = "ann") -> str:
    async with tenant(world.db, org_id) as conn:
        made = await users.create_user(
            conn,
            org_id=org_id,
            email=f"{name}@x.example",
            name=name,
            role=role,
            actor=COMMAND_LINE,
        )
    return made.id


async def key_of(world: World, project_id: str, user_id: str, scopes: list[str]) -> str:
    body = {"name": "k", "project_id": project_id, "user_id": user_id, "scopes": scopes}
    made = await world.call("POST", "/v1/admin/keys", body)
    assert made.status_code == 201, made.text
    return str(made.json()["value"])


async def test_an_org_says_from_which_pages_browsers_may_call(world: World) -> None:
    seen = await world.call("GET", ORGANIZATION)
    assert seen.json()["cors_origins"] == []
    body = {"cors_origins": [PAGE]}
    stale = await world.call("PATCH", ORGANIZATION, body, if_match='"stale"')
    assert stale.status_code == 412
    changed = await world.call("PATCH", ORGANIZATION, body, if_match=seen.headers["etag"])
    assert changed.status_code == 200 and changed.json()["cors_origins"] == [PAGE]
    assert (await world.call("GET", ORGANIZATION)).headers["etag"] == changed.headers["etag"]
    nothing = await world.call("PATCH", ORGANIZATION, {})
    assert nothing.json() == changed.json()
    entries = (await world.call("GET", "/v1/organization/audit_logs?limit=1")).json()["data"]
    assert entries[0]["type"] == "organization.updated"
    assert (await world.call("PATCH", ORGANIZATION, {"cors_origins": []})).json() == seen.json()


@pytest.mark.parametrize("origin", ["*", "null", "https://app.example/", "HTTPS://APP.example"])
async def test_what_is_no_origin_is_refused_by_name(world: World, origin: str) -> None:
    refused = await world.call("PATCH", ORGANIZATION, {"cors_origins": [origin]})
    assert (refused.status_code, refused.json()["param"]) == (400, "cors_origins")


async def test_a_project_is_made_on_a_plan_and_changes_it(world: World, org_id: str) -> None:
    made = await world.call("POST", PROJECTS, {"name": "web", "plan": "gold"})
    assert made.status_code == 201 and made.json()["plan"] == "gold", made.text
    one = f"{PROJECTS}/{made.json()['id']}"
    again = await world.call("POST", PROJECTS, {"name": "web"})
    assert (again.status_code, again.json()["code"]) == (409, "name_taken")
    change = {"plan": None, "name": "site"}
    changed = await world.call("PATCH", one, change, if_match=made.headers["etag"])
    assert (changed.json()["plan"], changed.json()["name"]) == (None, "site"), changed.text
    late = await world.call("PATCH", one, {"plan": "gold"}, if_match=made.headers["etag"])
    assert late.status_code == 412
    assert (await world.call("GET", one)).json() == changed.json()
    unknown = await world.call("PATCH", one, {"plan": "none"})
    assert (unknown.status_code, unknown.json()["param"]) == (404, "plan")
    listed = (await world.call("GET", PROJECTS + "?order=desc&limit=1")).json()
    assert listed["data"] == [changed.json()] and listed["has_more"]


@pytest.mark.parametrize("role", ["owner", "admin", "developer", "billing", "reader"])
async def test_an_admin_invites_with_any_role_and_changes_it(
    world: World, org_id: str, project_id: str, role: str
) -> None:
    body = {
        "email": "new@x.example",
        "role": role,
        "projects": [{"id": project_id, "role": "owner"}],
    }
    made = await world.call("POST", INVITES, body)
    assert made.status_code == 201 and made.headers["cache-control"] == "no-store", made.text
    assert made.json()["role"] == role and "token=" in made.json()["url"]
    seen = (await world.call("GET", f"/v1/organization/invites/{made.json()['id']}")).json()
    assert seen["role"] == role and seen["projects"] == [{"id": project_id, "role": "owner"}]
    user_id = await make_user(world, org_id, "reader" if role != "reader" else "billing")
    one = f"/v1/admin/users/{user_id}"
    tag = (await world.call("GET", one)).headers["etag"]
    changed = await world.call("PATCH", one, {"role": role}, if_match=tag)
    assert changed.json()["role"] == role
    late = await world.call("PATCH", one, {"role": "developer"}, if_match=tag)
    assert late.status_code == 412
    assert (await world.call("GET", one)).json() == changed.json()


async def test_the_e_mail_of_a_user_is_chosen_for_them(world: World, org_id: str) -> None:
    user_id = await make_user(world, org_id, "admin")
    one = f"/v1/admin/users/{user_id}"
    before = (await world.call("GET", one)).json()["mail"]
    assert before == {
        "approvals": True, "batches": False, "budgets": True, "credits": True, "disputes": False,
        "rate_limits": False,
    }  # fmt: skip
    choice = {"mail": {"budgets": False, "rate_limits": True}}
    changed = await world.call("PATCH", one, choice)
    assert changed.json()["mail"] == before | choice["mail"]
    wrong = await world.call("PATCH", one, {"mail": {"weather": True}})
    assert wrong.status_code == 400 and wrong.json()["param"] == "mail.weather", wrong.text
    assert (await world.call("GET", one)).json() == changed.json()


async def test_nobody_silences_who_has_more_than_they_have(
    world: World, org_id: str, project_id: str
) -> None:
    admin = await make_user(world, org_id, "admin")
    owner = await make_user(world, org_id, "owner", "bob")
    key = await key_of(world, project_id, admin, ["admin:members", "admin:read"])
    body = {"mail": {"budgets": False}}
    refused = await world.call("PATCH", f"/v1/admin/users/{owner}", body, key=key)
    assert (refused.status_code, refused.json()["param"]) == (403, "role")


async def test_nobody_gives_or_takes_more_than_they_have(
    world: World, org_id: str, project_id: str
) -> None:
    admin = await make_user(world, org_id, "admin")
    owner = await make_user(world, org_id, "owner", "bob")
    key = await key_of(world, project_id, admin, ["admin:members", "admin:read"])
    calls = (
        ("POST", INVITES, {"email": "new@x.example", "role": "owner"}),
        ("PATCH", f"/v1/admin/users/{owner}", {"role": "reader"}),
        ("PATCH", f"/v1/admin/users/{admin}", {"role": "owner"}),
    )
    for method, path, body in calls:
        refused = await world.call(method, path, body, key=key)
        assert (refused.status_code, refused.json()["param"]) == (403, "role"), refused.text
    last = await world.call("PATCH", f"/v1/admin/users/{owner}", {"role": "reader"})
    assert (last.status_code, last.json()["param"]) == (409, "role")
