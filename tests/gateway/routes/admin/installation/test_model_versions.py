"""Versions of models and pins: refused in one line that names the field, and known to the fleet."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.registry.changes import read_table
from tests.gateway.routes.admin.changing import ADMIN, Maker
from tests.gateway.routes.admin.conftest import World

VERSIONS, PINS = f"{ADMIN}/models/versions", f"{ADMIN}/models/pins"


@pytest.fixture
def maker(world: World, org_id: str, project_id: str) -> Maker:
    return Maker(world, org_id, project_id)


async def refused(world: World, path: str, body: Any) -> tuple[int, str, str]:
    answer = await world.call("POST", path, body)
    found = answer.json()
    return answer.status_code, found["param"], found["detail"]


async def test_the_first_version_is_the_model_itself(world: World, maker: Maker) -> None:
    body = await maker.version_body()
    made = await maker.post(VERSIONS, body)
    assert (made["version"], made["served_by"]) == (2, body["served_by"])
    third = await maker.post(VERSIONS, {**body, "served_by": await maker.served_model()})
    assert third["version"] == 3
    listed = (await world.call("GET", f"{VERSIONS}?model={body['model']}")).json()["data"]
    assert [each["served_by"] for each in listed][:2] == [body["model"], body["served_by"]]
    assert len({each["digest"] for each in listed}) == 3


async def test_two_versions_of_one_digest_are_refused(world: World, maker: Maker) -> None:
    body = await maker.version_body()
    await maker.post(VERSIONS, body)
    twin = await maker.served_model()
    configuration = world.services.configuration
    assert configuration is not None
    models = {each.name: each for each in configuration.settings.models}
    same = msgspec.structs.replace(models[body["served_by"]], name=twin)
    configuration.settings = msgspec.structs.replace(
        configuration.settings, models=tuple({**models, twin: same}.values())
    )
    status, field, line = await refused(world, VERSIONS, {**body, "served_by": twin})
    assert (status, field) == (409, "served_by")
    assert "of version 2 of" in line and "\n" not in line


async def test_what_is_a_version_already_or_is_not_served_is_refused(
    world: World, maker: Maker
) -> None:
    body = await maker.version_body()
    await maker.post(VERSIONS, body)
    again = await refused(world, VERSIONS, body)
    assert again[:2] == (409, "served_by") and "is version 2 of" in again[2]
    turned = {"model": body["served_by"], "served_by": await maker.served_model()}
    assert (await refused(world, VERSIONS, turned))[:2] == (409, "served_by")
    for field in ("model", "served_by"):
        assert (await refused(world, VERSIONS, {**body, field: "nobody"}))[:2] == (404, field)


async def test_pins_are_to_versions_that_serve_and_of_who_is_there(
    world: World, maker: Maker
) -> None:
    body = await maker.pin_body()
    assert (await refused(world, PINS, {**body, "version": 9}))[:2] == (404, "version")
    assert (await refused(world, PINS, {**body, "scope_id": "org_x"}))[:2] == (404, "scope_id")
    everybody = {**body, "scope": "installation"}
    assert (await refused(world, PINS, everybody))[:2] == (400, "scope_id")
    fleet = world.services.generation.fleet
    before = fleet.routes
    fleet.replace(each for each in before if each.model != body["model"])
    try:
        status, field, line = await refused(world, PINS, body)
        assert (status, field) == (400, "version") and "does not serve" in line
    finally:
        fleet.replace(before)


async def test_a_pin_moves_its_holder_and_keeps_its_version(world: World, maker: Maker) -> None:
    body = await maker.pin_body()
    first = await maker.post(PINS, body)
    second = await maker.post(PINS, {**body, "version": 2})
    assert second["id"] == first["id"]
    async with world.services.system_db.connect() as conn:
        world.services.generation.fleet.versions = await read_table(conn)
    principal = await world.services.authenticator.authenticate(world.admin_key)
    serving = world.services.generation.fleet.resolve(body["model"], principal)
    assert serving.model != body["model"]
    [kept] = (await world.call("GET", f"{VERSIONS}?model={body['model']}")).json()["data"][1:]
    gone = await world.call("DELETE", f"{VERSIONS}/{kept['id']}")
    assert gone.status_code == 409 and "1 pins lead to version 2" in gone.json()["detail"]
    assert (await world.call("DELETE", f"{PINS}/{first['id']}")).status_code == 200
    assert (await world.call("DELETE", f"{VERSIONS}/{kept['id']}")).status_code == 200
