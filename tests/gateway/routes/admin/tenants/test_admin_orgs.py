"""/v1/admin/orgs in the whole application: made with the one way in, changed, archived."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from gateway.audit.tables import entries
from gateway.audit.verify import verify
from gateway.ids import uuid7
from tests.gateway.routes.admin.conftest import World

PATH = "/v1/admin/orgs"


@pytest.fixture
def name() -> str:
    """That nobody has."""
    return f"acme-{uuid7().hex}"


async def make(world: World, name: str, **body: Any) -> dict[str, Any]:
    made = await world.call("POST", PATH, {"name": name, **body})
    assert made.status_code == 201, made.text
    assert made.headers["cache-control"] == "no-store"
    found: dict[str, Any] = made.json()
    return found


async def actions(world: World, org_id: str) -> list[str]:
    async with world.db.connect() as conn:
        found = sa.select(entries.c.action).where(entries.c.org_id == org_id)
        return list(await conn.scalars(found.order_by(entries.c.sequence)))


async def test_an_org_is_made_with_a_key_that_administers_it(
    world: World, org_id: str, name: str
) -> None:
    made = await make(world, name, plan="gold")
    org = made["organization"]
    assert (org["name"], org["plan"], org["is_operator"]) == (name, "gold", False)
    assert made["owner_invite"] is None and org["archived_at"] is None
    key = made["admin_key"]["value"]
    projects = await world.sdk_of(key).admin.organization.audit_logs.list()
    assert {each.type for each in projects.data} >= {"project.created", "api_key.created"}
    for method, path in (("GET", PATH), ("POST", PATH), ("POST", "/v1/admin/plans")):
        refused = await world.call(method, path, {"name": "x"}, key=key)
        assert refused.status_code == 403, "it runs its org, and not the installation"
    log = await actions(world, org["id"])
    assert log[:2] == ["organization.created", "project.created"] and "api_key.created" in log
    assert "organization.created" in await actions(world, org_id)
    verdicts = [each async for each in verify(world.db, {}, org_ids=[org["id"], org_id])]
    assert [each.finding for each in verdicts] == [None, None]


async def test_an_org_is_made_with_an_invite_for_its_owner(world: World, name: str) -> None:
    made = await make(world, name, owner_email="alice@acme.example")
    invite = made["owner_invite"]
    assert made["admin_key"] is None and invite["email"] == "alice@acme.example"
    assert invite["id"].startswith("invite_") and "token=" in invite["url"]
    assert invite["url"].startswith("http") and invite["expires_at"] > 0
    async with world.db.connect() as conn:
        of_org = {"o": made["organization"]["id"]}
        rows = await conn.scalars(sa.text("SELECT role FROM invites WHERE org_id = :o"), of_org)
        assert list(rows) == ["owner"]
        num_keys = sa.text("SELECT count(*) FROM api_keys WHERE org_id = :o")
        assert await conn.scalar(num_keys, of_org) == 0


async def test_repeated_it_makes_one_org_and_shows_the_key_again(
    world: World, org_id: str, name: str
) -> None:
    answers = [
        await world.call("POST", PATH, {"name": name}, idempotency_key="k") for _ in range(2)
    ]
    first, second = answers
    assert first.status_code == second.status_code == 201 and first.content == second.content
    assert second.headers["idempotent-replayed"] == "true"
    key = first.json()["admin_key"]["value"]
    async with world.db.connect() as conn:
        found = sa.text("SELECT response FROM idempotency_keys WHERE org_id = :o")
        (kept,) = await conn.scalars(found, {"o": org_id})
    assert key.encode() not in kept


async def test_orgs_are_listed_renamed_and_archived(world: World, org_id: str, name: str) -> None:
    """Behind that of the operator, which is the last one before it."""
    operator = org_id
    made = await make(world, name)
    org_id, key = made["organization"]["id"], made["admin_key"]["value"]
    listing = (await world.call("GET", f"{PATH}?limit=1")).json()
    assert [each["name"] for each in listing["data"]] == ["default"]
    listing = (await world.call("GET", f"{PATH}?after={operator}")).json()
    assert [each["name"] for each in listing["data"]] == [name]
    first = (await world.call("GET", f"{PATH}?limit=1&order=desc")).json()
    assert (first["data"][0]["id"], first["has_more"]) == (org_id, True)
    shown = await world.call("GET", f"{PATH}/{org_id}")
    assert shown.json() == made["organization"]
    etag = shown.headers["etag"]
    patch = {"name": f"{name} two", "plan": "gold"}
    changed = await world.call("PATCH", f"{PATH}/{org_id}", patch, if_match=etag)
    assert changed.status_code == 200
    assert (changed.json()["name"], changed.json()["plan"]) == (f"{name} two", "gold")
    late = await world.call("PATCH", f"{PATH}/{org_id}", {"plan": None}, if_match=etag)
    assert late.status_code == 412
    same = await world.call("PATCH", f"{PATH}/{org_id}", patch)
    assert same.headers["etag"] == changed.headers["etag"]
    late = await world.call("POST", f"{PATH}/{org_id}/archive", if_match=etag)
    assert late.status_code == 412
    for _ in range(2):
        archived = await world.call("POST", f"{PATH}/{org_id}/archive")
        assert archived.status_code == 200 and archived.json()["archived_at"] is not None
    assert (await world.call("GET", f"{PATH}?after={operator}")).json()["data"] == []
    everything = f"{PATH}?after={operator}&include_archived=true"
    assert [each["id"] for each in (await world.call("GET", everything)).json()["data"]] == [org_id]
    refused = await world.call("GET", "/v1/organization/audit_logs", key=key)
    assert refused.status_code == 401, "its credentials are dead"
    gone = await world.call("PATCH", f"{PATH}/{org_id}", {"plan": None})
    assert gone.status_code == 404
    log = [each for each in await actions(world, org_id) if each.startswith("organization.")]
    assert log == ["organization.created", "organization.updated", "organization.archived"]
    operators = await actions(world, operator)
    assert [each for each in operators if each.startswith("organization.")][-3:] == log


async def test_an_operator_stays_where_he_stands(world: World, org_id: str) -> None:
    refused = await world.call("POST", f"{PATH}/{org_id}/archive")
    assert refused.status_code == 409 and refused.json()["code"] == "read_only"


NOT_TO_BE_MADE: list[Any] = [
    ({}, 400, "name"),
    ({"name": ""}, 400, "name"),
    ({"name": " x"}, 400, "name"),
    ({"name": "x", "plan": "none"}, 404, "plan"),
    ({"name": "x", "owner_email": "nobody"}, 400, "email"),
    ({"name": "x", "is_operator": True}, 400, "is_operator"),
    ({"name": "default"}, 409, "name"),
]


async def test_what_cannot_be_made_is_refused_by_name(
    world: World, subtests: pytest.Subtests
) -> None:
    num_orgs = sa.text("SELECT count(*) FROM orgs")
    async with world.db.connect() as conn:
        before = await conn.scalar(num_orgs)
    for body, status, param in NOT_TO_BE_MADE:
        with subtests.test(body=body, status=status, param=param):
            refused = await world.call("POST", PATH, body)
            assert (refused.status_code, refused.json()["param"]) == (status, param)
            async with world.db.connect() as conn:
                assert await conn.scalar(num_orgs) == before


async def test_a_name_is_given_once(world: World, name: str) -> None:
    org_id = (await make(world, name))["organization"]["id"]
    taken = await world.call("PATCH", f"{PATH}/{org_id}", {"name": "default"})
    assert taken.status_code == 409 and taken.json()["code"] == "name_taken"
    for bad in ({"name": "a\u0000b"}, {"name": None}, {"plan": "none"}, {"id": "x"}):
        refused = await world.call("PATCH", f"{PATH}/{org_id}", bad)
        assert refused.status_code in (400, 404), bad
    for method, path in (("GET", ""), ("PATCH", ""), ("POST", "/archive")):
        body = {} if method == "PATCH" else None
        assert (await world.call(method, f"{PATH}/org_none{path}", body)).status_code == 404


async def test_a_nul_is_refused_wherever_it_stands(world: World, org_id: str) -> None:
    calls: list[tuple[str, str, Any]] = [
        ("GET", f"{PATH}/%00", None),
        ("GET", "/v1/admin/plans/a%00b", None),
        ("POST", PATH, {"name": "x", "plan": "\0"}),
        ("PATCH", f"{PATH}/{org_id}", {"plan": "\0"}),
    ]
    for method, path, body in calls:
        refused = await world.call(method, path, body)
        assert refused.status_code == 400, (path, refused.text)


ODD_IDS: list[Any] = ["%C3%28", "%F0%9F%98%80", "..%2F", "x" * 3000]


async def test_an_odd_id_is_an_unknown_one(world: World, subtests: pytest.Subtests) -> None:
    for odd in ODD_IDS:
        with subtests.test(odd=odd):
            for path in ("/v1/admin/orgs", "/v1/admin/plans", "/v1/admin/models"):
                answer = await world.call("GET", f"{path}/{odd}")
                assert answer.status_code == 404, (path, answer.text)


async def test_an_orgs_endpoint_is_described_while_there_is_the_org(
    world: World, name: str
) -> None:
    org_id = (await make(world, name))["organization"]["id"]
    path = f"/.well-known/oauth-protected-resource/mcp/{org_id}"
    found = await world.http.get(path)
    assert found.status_code == 200 and found.json()["resource"].endswith(f"/mcp/{org_id}")
    assert found.headers["access-control-allow-origin"] == "*"
    assert (await world.call("POST", f"{PATH}/{org_id}/archive")).status_code == 200
    assert (await world.http.get(path)).status_code == 404
    assert (await world.http.get(path[:-1] + "g")).status_code == 404
    unknown = path.replace(org_id, "org_" + "0" * 32)
    assert (await world.http.get(unknown)).status_code == 404
