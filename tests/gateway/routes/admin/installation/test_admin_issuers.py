"""/v1/admin/issuers: listed, changed as seen, ended; and nobody gives by it what they lack."""

from __future__ import annotations

from typing import Any

import httpx
import sqlalchemy as sa

from gateway.audit.log import COMMAND_LINE
from gateway.tenancy.keys.keys import create_key
from tests.gateway.routes.admin.conftest import World

PATH = "/v1/admin/issuers"


async def ask(
    world: World, method: str, path: str = PATH, *, key: str | None = None, **more: Any
) -> httpx.Response:
    headers = {"authorization": f"Bearer {key or world.admin_key}", **more.pop("headers", {})}
    return await world.http.request(method, path, headers=headers, **more)


async def body_of(world: World, **more: Any) -> dict[str, Any]:
    project, *_ = (await world.sdk.admin.organization.projects.list()).data
    given = {
        "name": "Example",
        "issuer": "https://issuer.example.com",
        "audience": "api://acme",
        "project_id": project.id,
        "default_role": "developer",
        "client_id": "ours",
        "client_secret": "s3cret of ours",
    }
    return given | more


async def test_an_issuer_is_listed_shown_changed_and_ended(world: World) -> None:
    body = await body_of(world)
    once = {"idempotency-key": "list-it"}
    made = await ask(world, "POST", json=body, headers=once)
    assert made.status_code == 201, made.text
    assert made.json()["has_client_secret"] and "s3cret" not in made.text
    callback = f"/oauth/external/{made.json()['id']}/callback"
    assert made.json()["redirect_uri"].endswith(callback), "what is registered at the issuer"
    again = await ask(world, "POST", json=body, headers=once)
    assert again.json() == made.json() and again.headers["idempotent-replayed"] == "true"
    taken = await ask(world, "POST", json=body)
    assert taken.status_code == 409
    assert taken.headers["content-type"] == "application/problem+json"

    one = made.headers["location"]
    shown = await ask(world, "GET", one)
    assert shown.json() == made.json()
    listing = (await ask(world, "GET", f"{PATH}?limit=1")).json()
    assert listing["data"] == [made.json()] and not listing["has_more"]
    seen = {"if-match": shown.headers["etag"]}
    less = {k: v for k, v in body.items() if k != "client_secret"} | {"default_role": "reader"}
    changed = await ask(world, "PUT", one, json=less, headers=seen)
    assert changed.status_code == 200 and changed.json()["default_role"] == "reader"
    assert changed.json()["has_client_secret"], "it stays until it is replaced"
    for method, more in (("PUT", {"json": less}), ("DELETE", {})):
        assert (await ask(world, method, one, headers=seen, **more)).status_code == 412
    gone = await ask(world, "DELETE", one, headers={"if-match": changed.headers["etag"]})
    assert gone.json() == {"object": "issuer.deleted", "id": made.json()["id"], "deleted": True}
    assert (await ask(world, "GET", one)).status_code == 404
    assert (await ask(world, "GET")).json()["data"] == []


async def test_what_breaks_a_rule_is_refused_by_field(world: World) -> None:
    for field, value in (
        ("issuer", "http://169.254.169.254"),
        ("algorithms", ["none"]),
        ("default_role", "king"),
        ("leeway_s", 300),
        ("client_secret", ""),
        ("unknown", 1),
    ):
        refused = await ask(world, "POST", json=await body_of(world, **{field: value}))
        assert refused.status_code == 400, field
        assert field in refused.text


async def test_nobody_gives_what_they_do_not_have(world: World) -> None:
    services = world.services
    body = await body_of(world)
    async with services.system_db.begin() as conn:
        org_id = await conn.scalar(sa.text("SELECT id FROM orgs WHERE is_operator"))
        authenticator = services.authenticator
        pepper_id, pepper = authenticator._peppers[0]
        made = await create_key(
            conn,
            org_id=org_id,
            project_id=body["project_id"],
            name="issuers",
            scopes=["admin:issuers", "admin:read", "usage:read"],
            pepper=pepper,
            pepper_id=pepper_id,
            actor=COMMAND_LINE,
        )
    for more in ({"default_role": "owner"}, {"scopes": ["admin:*"]}, {"roles": {"a": "admin"}}):
        refused = await ask(world, "POST", json=body | {"role_claim": "r"} | more, key=made.secret)
        assert refused.status_code == 403, more
    allowed = body | {"scopes": ["admin:read"], "default_role": "reader"}
    listed = await ask(world, "POST", json=allowed, key=made.secret)
    assert listed.status_code == 201, listed.text
    assert (await ask(world, "POST", json=body, key=world.api_key)).status_code == 403
