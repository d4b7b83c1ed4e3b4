"""/v1/admin/spend-caps: whose caps bind whom, who may set them, and what a principal is told."""

from __future__ import annotations

import asyncio

import sqlalchemy as sa

from gateway.audit.tables import entries
from gateway.ids import uuid7
from gateway.principal import SpendCap
from tests.gateway.routes.admin.changing import ADMIN
from tests.gateway.routes.admin.conftest import World

CAPS = f"{ADMIN}/spend-caps"
NANO = 1_000_000_000


async def told(world: World, *caps: SpendCap) -> None:
    """Within a second, whom they bind knows of them."""
    found: tuple[SpendCap, ...] | None = None
    async with asyncio.timeout(30):
        while found != caps:
            await asyncio.sleep(0.01)
            found = (await world.services.authenticator.authenticate(world.api_key)).spend_caps


async def test_a_cap_is_made_changed_lifted_and_told_to_whom_it_binds(world: World) -> None:
    who = await world.services.authenticator.authenticate(world.api_key)
    project = {"project_id": who.project_id}
    made = await world.call("POST", CAPS, {**project, "period": "month", "amount_usd": "12.50"})
    assert made.status_code == 201, made.text
    cap = made.json()
    assert (cap["scope"], cap["amount_usd"], cap["hard"]) == ("project", "12.5", True)
    for body in (
        {"period": "day", "amount_usd": "3"},
        {"period": "total", "amount_usd": "1", "hard": False},
        {"key_id": who.key_id, "period": "total", "amount_usd": "0.000000001"},
    ):
        assert (await world.call("POST", CAPS, body)).status_code == 201
    of_key = SpendCap("key", who.key_id, "total", 1)
    of_org = SpendCap("org", who.org_id, "day", 3 * NANO)
    of_project = SpendCap("project", who.project_id, "month", 12 * NANO + NANO // 2)
    await told(world, of_key, of_org, of_project)  # a soft one binds nobody
    path, etag = f"{CAPS}/{cap['id']}", made.headers["etag"]
    changed = await world.call("PATCH", path, {"amount_usd": "7"}, if_match=etag)
    assert changed.json()["amount_usd"] == "7"
    late = await world.call("PATCH", path, {"amount_usd": "8"}, if_match=etag)
    assert late.status_code == 412
    await told(world, of_key, of_org, SpendCap("project", who.project_id, "month", 7 * NANO))
    for _ in range(2):
        archived = await world.call("POST", f"{path}/archive")
        assert archived.status_code == 200 and archived.json()["archived_at"] is not None
    late = await world.call("PATCH", path, {"amount_usd": "8"})
    assert late.status_code == 409 and late.json()["code"] == "read_only"
    await told(world, of_key, of_org)
    async with world.db.connect() as conn:
        found = sa.select(entries.c.action).where(entries.c.target == cap["id"])
        log = list(await conn.scalars(found.order_by(entries.c.sequence)))
    assert log == ["spend_cap.created", "spend_cap.updated", "spend_cap.archived"]


async def test_a_cap_of_a_model_or_a_tag_is_soft_and_stays_so(world: World) -> None:
    body = {"period": "day", "amount_usd": "3", "hard": False}
    for scope, one, other in (("model", "far", "near"), ("tag", "team=a", "team=b")):
        made = await world.call("POST", CAPS, {**body, scope: one})
        assert made.status_code == 201, made.text
        assert (made.json()["scope"], made.json()[scope]) == (scope, one)
        assert (await world.call("POST", CAPS, {**body, scope: one})).status_code == 409
        assert (await world.call("POST", CAPS, {**body, scope: other})).status_code == 201
    path = f"{CAPS}/{made.json()['id']}"
    hardened = await world.call("PATCH", path, {"hard": True})
    assert (hardened.status_code, hardened.json()["param"]) == (400, "hard")
    assert (await world.call("PATCH", path, {"amount_usd": "4"})).status_code == 200


async def test_of_one_owner_and_period_there_is_one_cap(world: World) -> None:
    body = {"period": "day", "amount_usd": "3"}
    assert (await world.call("POST", CAPS, body)).status_code == 201
    again = await world.call("POST", CAPS, body)
    assert again.status_code == 409 and again.json()["code"] == "conflict"
    soft = await world.call("POST", CAPS, {**body, "hard": False})
    assert soft.status_code == 201
    hardened = await world.call("PATCH", f"{CAPS}/{soft.json()['id']}", {"hard": True})
    assert hardened.status_code == 409
    for wrong in (
        {"period": "day", "amount_usd": "9000000.000000001"},
        {"period": "day", "amount_usd": "1e3"},
        {"period": "week", "amount_usd": "1"},
        {"period": "day", "amount_usd": "1", "key_id": "k", "project_id": "p"},
        {"period": "day", "amount_usd": "1", "model": "far", "hard": True},
        {"period": "day", "amount_usd": "1", "model": "far", "hard": False, "project_id": "p"},
        {"period": "day", "amount_usd": "1", "model": "", "hard": False},
        {"period": "day", "amount_usd": "1", "tag": "team=a"},
        {"period": "day", "amount_usd": "1", "tag": "team", "hard": False},
        {"period": "day", "amount_usd": "1", "tag": "a=b", "hard": False, "model": "far"},
    ):
        assert (await world.call("POST", CAPS, wrong)).status_code == 400
    gone = await world.call("POST", CAPS, {"period": "day", "amount_usd": "1", "key_id": "k"})
    assert gone.status_code == 404


async def test_an_amount_that_is_none_is_told_what_one_is(world: World) -> None:
    form = (
        'a decimal text in USD such as "12.50", of at most 7 digits before the point and 9 behind'
    )
    for amount in ("1e3", "-1", "12,50", "1\n"):
        told = await world.call("POST", CAPS, {"period": "day", "amount_usd": amount})
        assert (told.status_code, told.json()["param"]) == (400, "amount_usd")
        assert told.json()["detail"] == f"This must be {form} it."
    told = await world.call("POST", CAPS, {"period": "day", "amount_usd": "1", "key_id": "a b"})
    assert (told.status_code, told.json()["detail"]) == (
        400,
        "This must be a text of another form.",
    )


async def test_the_name_of_a_model_has_no_nul(world: World) -> None:
    caps = {"period": "day", "amount_usd": "1", "hard": False, "model": "far\0"}
    credit = {"org_id": "org_a", "amount_usd": "1", "models": ["far\0"]}
    for path, body, named in ((CAPS, caps, "model"), (f"{ADMIN}/credits", credit, "models[0]")):
        told = await world.call("POST", path, body)
        assert (told.status_code, told.json()["param"]) == (400, named)
        assert "has no NUL" in told.json()["detail"]


async def test_what_the_operator_has_set_no_tenant_lifts(world: World) -> None:
    made = await world.call("POST", f"{ADMIN}/orgs", {"name": f"tenant-{uuid7().hex}"})
    org_id = made.json()["organization"]["id"]
    key = made.json()["admin_key"]["value"]
    body = {"period": "month", "amount_usd": "100"}
    where = f"{CAPS}?org_id={org_id}"
    assert (await world.call("POST", where, body, key=key)).status_code == 403
    set_by_operator = await world.call("POST", where, body)
    assert set_by_operator.status_code == 201
    cap_id = set_by_operator.json()["id"]
    own = await world.call("POST", CAPS, {**body, "amount_usd": "200"}, key=key)
    assert own.status_code == 201, "its own stands beside it"
    listed = (await world.call("GET", CAPS, key=key)).json()["data"]
    assert [each["by_operator"] for each in listed] == [True, False]
    for method, path, change in (
        ("PATCH", f"{CAPS}/{cap_id}", {"amount_usd": "999"}),
        ("POST", f"{CAPS}/{cap_id}/archive", None),
    ):
        refused = await world.call(method, path, change, key=key)
        assert refused.status_code == 409 and refused.json()["code"] == "read_only"
    lifted = await world.call("POST", f"{CAPS}/{cap_id}/archive?org_id={org_id}")
    assert lifted.status_code == 200
