"""/v1/admin/plans, price_lists and models in the whole application."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa

from gateway.audit.tables import entries
from gateway.ids import uuid7
from gateway.routes.admin.installation.models import CacheContractView, to_contract
from tests.gateway.routes.admin.conftest import World


@pytest.fixture
def new() -> dict[str, Any]:
    """A plan whose name nobody has."""
    return {
        "name": f"silver-{uuid7().hex}",
        "tokens_per_minute": 100,
        "batch_tokens_per_day": 9000,
        "requests_per_minute": None,
        "lane": "batch",
        "price_list": "default",
    }


async def actions(world: World, org_id: str) -> list[tuple[str, str, str | None, str | None]]:
    """Return what the operator's audit log says of plans."""
    async with world.db.connect() as conn:
        found = sa.select(entries.c.action, entries.c.target, entries.c.before, entries.c.after)
        found = found.where(entries.c.action.like("plan.%"), entries.c.org_id == org_id).order_by(
            entries.c.sequence
        )
        return [tuple(row) for row in await conn.execute(found)]


async def test_a_plan_is_made_changed_and_archived(
    world: World, org_id: str, new: dict[str, Any]
) -> None:
    name, path = new["name"], f"/v1/admin/plans/{new['name']}"
    made = await world.call("POST", "/v1/admin/plans", new)
    assert made.status_code == 201, made.text
    plan = made.json()
    assert isinstance(plan.pop("created_at"), int)
    assert plan == {
        "object": "plan",
        "name": name,
        "tokens_per_minute": 100,
        "requests_per_minute": None,
        "max_concurrent_streams": None,
        "input_tokens_per_minute": None,
        "output_tokens_per_minute": None,
        "batch_tokens_per_day": 9000,
        "weight": None,
        "lane": "batch",
        "price_list": "default",
        "read_only": False,
        "archived_at": None,
    }
    shown = await world.call("GET", path)
    assert shown.content == made.content and shown.headers["etag"] == made.headers["etag"]
    patch = {"tokens_per_minute": 200, "lane": None}
    changed = await world.call("PATCH", path, patch)
    assert changed.status_code == 200 and changed.headers["etag"] != made.headers["etag"]
    assert (changed.json()["tokens_per_minute"], changed.json()["lane"]) == (200, None)
    assert changed.json()["price_list"] == "default", "what is not named stays"
    same = await world.call("PATCH", path, patch)
    assert same.headers["etag"] == changed.headers["etag"]
    for _ in range(2):
        archived = await world.call("POST", f"{path}/archive")
        assert archived.status_code == 200 and archived.json()["archived_at"] is not None
    late = await world.call("PATCH", path, patch)
    assert late.status_code == 409 and late.json()["code"] == "read_only"
    assert (await world.call("POST", "/v1/admin/plans", new)).json()["code"] == "name_taken"
    log = await actions(world, org_id)
    assert [entry[:2] for entry in log] == [
        ("plan.created", name),
        ("plan.updated", name),
        ("plan.archived", name),
    ]
    assert log[1][2:] == (
        '{"lane":"batch","tokens_per_minute":100}',
        '{"lane":null,"tokens_per_minute":200}',
    )


async def test_a_plan_of_the_settings_is_read_only(world: World, org_id: str) -> None:
    assert (await world.call("GET", "/v1/admin/plans/gold")).json()["read_only"] is True
    patched = await world.call("PATCH", "/v1/admin/plans/gold", {"tokens_per_minute": 1})
    archived = await world.call("POST", "/v1/admin/plans/gold/archive")
    for refused in (patched, archived):
        assert refused.status_code == 409 and refused.json()["code"] == "read_only"
    assert await actions(world, org_id) == []


async def test_who_has_seen_another_state_changes_nothing(
    world: World, new: dict[str, Any]
) -> None:
    etag = (await world.call("POST", "/v1/admin/plans", new)).headers["etag"]
    path = f"/v1/admin/plans/{new['name']}"
    first = await world.call("PATCH", path, {"tokens_per_minute": 1}, if_match=etag)
    assert first.status_code == 200
    second = await world.call("PATCH", path, {"tokens_per_minute": 2}, if_match=etag)
    assert second.status_code == 412 and second.json()["code"] == "precondition_failed"
    late = await world.call("POST", f"{path}/archive", if_match=etag)
    assert late.status_code == 412
    third = await world.call(
        "PATCH", path, {"tokens_per_minute": 2}, if_match=first.headers["etag"]
    )
    assert third.status_code == 200


async def test_of_many_who_saw_the_same_state_one_changes_it(
    world: World, org_id: str, new: dict[str, Any]
) -> None:
    etag = (await world.call("POST", "/v1/admin/plans", new)).headers["etag"]

    async def change(number: int) -> int:
        body = {"tokens_per_minute": 1000 + number}
        path = f"/v1/admin/plans/{new['name']}"
        done = await world.call("PATCH", path, body, if_match=etag)
        return done.status_code

    statuses = await asyncio.gather(*(change(number) for number in range(12)))
    assert sorted(statuses) == [200, *[412] * 11]
    assert len(await actions(world, org_id)) == 2


async def test_a_repeated_request_makes_one_plan(
    world: World, org_id: str, new: dict[str, Any]
) -> None:
    answers = [
        await world.call("POST", "/v1/admin/plans", new, idempotency_key="once") for _ in range(2)
    ]
    assert [each.status_code for each in answers] == [201, 201]
    assert answers[0].content == answers[1].content
    assert answers[1].headers["idempotent-replayed"] == "true"
    assert len(await actions(world, org_id)) == 1


BAD_PLANS: list[Any] = [
    ({"name": "a b"}, "name"),
    ({"name": ""}, "name"),
    ({"name": "a\n"}, "name"),
    ({}, "name"),
    ({"name": "x", "tokens_per_minute": -1}, "tokens_per_minute"),
    ({"name": "x", "tokens_per_minute": 2**60}, "tokens_per_minute"),
    ({"name": "x", "tokens_per_minute": "1"}, "tokens_per_minute"),
    ({"name": "x", "lane": "fast"}, "lane"),
    ({"name": "x", "price_list": "cheap"}, "price_list"),
    ({"name": "x", "in_settings": True}, "in_settings"),
]


async def test_a_bad_plan_is_refused_by_name(world: World, subtests: pytest.Subtests) -> None:
    for body, param in BAD_PLANS:
        with subtests.test(body=body, param=param):
            refused = await world.call("POST", "/v1/admin/plans", body)
            assert refused.status_code == 400 and refused.json()["param"] == param
            assert refused.headers["content-type"] == "application/problem+json"


async def test_what_is_not_there_is_not_found(world: World) -> None:
    for method, path in (
        ("GET", "/v1/admin/plans/none"),
        ("PATCH", "/v1/admin/plans/none"),
        ("POST", "/v1/admin/plans/none/archive"),
        ("GET", "/v1/admin/price_lists/none"),
        ("GET", "/v1/admin/price_lists/none/prices"),
        ("GET", "/v1/admin/models/none"),
    ):
        missing = await world.call(method, path, {} if method == "PATCH" else None)
        assert missing.status_code == 404, path


async def test_the_price_list_says_what_is_priced(world: World) -> None:
    listing = (await world.call("GET", "/v1/admin/price_lists")).json()
    assert [each["id"] for each in listing["data"]] == ["default"]
    one = (await world.call("GET", "/v1/admin/price_lists/default")).json()
    assert one == listing["data"][0] and one["num_models"] >= 1 and one["rules"] == []
    path = "/v1/admin/price_lists/default/prices?model=penny"
    prices = (await world.call("GET", path)).json()["data"]
    by_component = {each["component"]: each for each in prices if each["tier"] == "default"}
    assert by_component["output"]["usd_per_million_tokens"] == "0.4"
    assert by_component["output"]["pico_usd_per_token"] == 400_000
    assert by_component["output"]["valid_to"] is None
    assert by_component["output"]["tier"] == "default"
    walked: list[str] = []
    after = ""
    while True:
        page = (await world.call("GET", f"{path}&limit=1{after}")).json()
        walked += [each["id"] for each in page["data"]]
        if not page["has_more"]:
            break
        after = f"&after={page['last_id']}"
    assert walked == sorted(each["id"] for each in prices)
    empty = await world.call("GET", "/v1/admin/price_lists/default/prices?model=nobody")
    assert empty.json()["data"] == []


async def test_models_are_shown_with_their_replicas(world: World) -> None:
    listing = (await world.call("GET", "/v1/admin/models")).json()
    (model,) = listing["data"]
    assert (model["id"], model["kind"]) == ("far", "upstream")
    (replica,) = model["replicas"]
    assert model["cache_contract"] is None
    assert to_contract("automatic") == CacheContractView(
        name="automatic", min_tokens=1024, step=128
    )
    assert replica["name"] == "far/0" and replica["weight"] == 1
    assert model["available"] == replica["available"]
    assert (await world.call("GET", "/v1/admin/models/far")).json() == model


async def test_no_tenant_changes_plans_or_sees_replicas(world: World) -> None:
    for method, path in (
        ("POST", "/v1/admin/plans"),
        ("PATCH", "/v1/admin/plans/gold"),
        ("POST", "/v1/admin/plans/gold/archive"),
        ("GET", "/v1/admin/models"),
        ("GET", "/v1/admin/plans"),
    ):
        refused = await world.call(method, path, {"name": "x"}, key=world.api_key)
        assert refused.status_code == 403, path
        assert refused.json()["code"] == "insufficient_permissions"
