"""Rollouts by the API: refused in one line that names the field, and shown with what was seen."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.gateway.routes.admin.changing import ADMIN, Maker
from tests.gateway.routes.admin.conftest import World

ROLLOUTS = f"{ADMIN}/models/rollouts"


@pytest.fixture
def maker(world: World, org_id: str, project_id: str) -> Maker:
    return Maker(world, org_id, project_id)


async def test_a_rollout_is_shown_with_what_was_seen(world: World, maker: Maker) -> None:
    made = await maker.post(ROLLOUTS, {**await maker.rollout_body(), "watch": 0})
    assert (made["state"], made["share"], made["steps"]) == ("running", 5, [5, 50])
    assert (made["from_version"], made["to_version"], made["at_least"]) == (1, 2, 500)
    assert made["new"]["requests"] == made["old"]["requests"] == 0
    path = f"{ROLLOUTS}/{made['id']}"
    paused = await world.call("POST", f"{path}/pause", {})
    assert (paused.json()["state"], paused.json()["share"]) == ("paused", 5)
    again = await world.call("POST", f"{path}/pause", {})
    assert again.status_code == 409 and "rollout is paused" in again.json()["detail"]
    done = await world.call("POST", f"{path}/complete", {})
    assert (done.json()["state"], done.json()["share"]) == ("completed", 0)
    [pin] = (await world.call("GET", f"{ADMIN}/models/pins?model={made['model']}")).json()["data"]
    assert (pin["scope"], pin["version"]) == ("installation", 2)


WRONG: tuple[tuple[dict[str, Any], int, str], ...] = (
    ({"version": 9}, 404, "version"),
    ({"version": 1}, 409, "version"),
    ({"steps": [50, 5]}, 400, "steps"),
    ({"steps": [0]}, 400, "steps[0]"),
    ({"steps": [100]}, 400, "steps"),
    ({"at_least": 0}, 400, "at_least"),
    ({"watch": -1}, 400, "watch"),
)


async def test_what_cannot_begin_is_refused(world: World, maker: Maker) -> None:
    body = await maker.rollout_body()
    for wrong, status, field in WRONG:
        answer = await world.call("POST", ROLLOUTS, {**body, **wrong})
        assert (answer.status_code, answer.json()["param"]) == (status, field)
    fleet = world.services.generation.fleet
    before = fleet.routes
    listed = (await world.call("GET", f"{ADMIN}/models/versions?model={body['model']}")).json()
    away = listed["data"][1]["served_by"]
    fleet.replace(each for each in before if each.model != away)
    try:
        answer = await world.call("POST", ROLLOUTS, body)
    finally:
        fleet.replace(before)
    assert answer.status_code == 400 and "does not serve now" in answer.json()["detail"]


async def test_a_rollout_begins_when_its_version_has_passed(world: World, maker: Maker) -> None:
    body = await maker.rollout_body()
    configuration = world.services.configuration
    assert configuration is not None
    models = tuple(
        msgspec.structs.replace(each, evaluations=("golden",))
        if each.name == body["model"]
        else each
        for each in configuration.settings.models
    )
    configuration.settings = msgspec.structs.replace(configuration.settings, models=models)
    refused = await world.call("POST", ROLLOUTS, body)
    assert (refused.status_code, refused.json()["param"]) == (409, "version")
    assert "was not asked by the evaluation 'golden'" in refused.json()["detail"]
    verdict = {"model": body["model"], "version": 2, "suite": "golden", "passed": True}
    made = await maker.post(f"{ADMIN}/models/evaluations", {**verdict, "evidence": "0.97"})
    assert (made["suite"], made["passed"], made["evidence"]) == ("golden", True, "0.97")
    await maker.post(ROLLOUTS, body)
    unknown = await world.call("POST", f"{ADMIN}/models/evaluations", {**verdict, "version": 9})
    assert (unknown.status_code, unknown.json()["param"]) == (404, "version")
