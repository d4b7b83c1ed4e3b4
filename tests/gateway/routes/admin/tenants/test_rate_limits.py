"""/v1/organization/projects/{id}/rate_limits: what is stored is enforced, what is not enforced is
refused."""

from __future__ import annotations

import asyncio

import openai
import pytest

from gateway.audit.log import COMMAND_LINE
from gateway.tenancy.projects import update_project
from tests.gateway.routes.admin.conftest import World
from tests.gateway.routes.admin.exactly import exact
from tests.pace import within


async def test_rate_limits(world: World, project_id: str) -> None:
    calls = world.sdk.admin.organization.projects.rate_limits
    [limit] = (await calls.list_rate_limits(project_id)).data
    exact(limit)
    assert (limit.id, limit.model) == ("rl-far", "far")
    changed = await calls.update_rate_limit(
        limit.id, project_id=project_id, max_requests_per_1_minute=7
    )
    exact(changed)
    assert changed.max_requests_per_1_minute == 7
    assert changed.max_tokens_per_1_minute == limit.max_tokens_per_1_minute
    assert (await calls.list_rate_limits(project_id)).data == [changed]
    assert (await calls.list_rate_limits(project_id, after="rl-far")).data == []
    assert (await calls.list_rate_limits(project_id, before="rl-far")).data == []
    with pytest.raises(openai.NotFoundError):
        await calls.update_rate_limit("rl-none", project_id=project_id)


async def test_a_projects_limit_of_a_model_binds_all_its_keys_within_a_second(
    world: World, project_id: str
) -> None:
    projects = world.sdk.admin.organization.projects
    made = await projects.service_accounts.create(project_id, name="ci")
    assert made.api_key is not None
    ask = {"model": "far", "messages": [{"role": "user", "content": "Hi"}]}

    async def status() -> int:
        path, key = "/v1/chat/completions", made.api_key.value  # type: ignore[union-attr]
        answer = await world.call("POST", path, ask, key=key)
        if answer.status_code == 429:
            assert "for this model" in answer.json()["error"]["message"]
        return answer.status_code

    assert await status() == 503  # nobody is there
    await projects.rate_limits.update_rate_limit(
        "rl-far", project_id=project_id, max_requests_per_1_minute=0
    )
    async with within(1.0):
        while await status() != 429:
            await asyncio.sleep(0.02)
    answer = await world.call("POST", "/v1/chat/completions", ask, key=world.api_key)
    assert answer.status_code == 503, "another project's keys are not bound"


async def test_a_limit_that_a_plan_would_make_void_is_refused(
    world: World, org_id: str, project_id: str
) -> None:
    await update_project(
        world.db,
        world.services.redis,
        project_id,
        {"plan": "gold"},
        org_id=org_id,
        actor=COMMAND_LINE,
    )
    calls = world.sdk.admin.organization.projects.rate_limits
    [limit] = (await calls.list_rate_limits(project_id)).data
    assert limit.max_requests_per_1_minute == 10
    with pytest.raises(openai.BadRequestError, match="at most 10") as refused:
        await calls.update_rate_limit("rl-far", project_id=project_id, max_requests_per_1_minute=11)
    assert refused.value.param == "max_requests_per_1_minute"
