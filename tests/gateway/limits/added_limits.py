"""Uses the limits that `test_adding_a_limit` adds to a copy of the product, from the settings to
the refusal, in the whole application. A process of its own, started in that copy:

    python -m tests.gateway.limits.added_limits FOLDER DATABASE_URL REDIS_URL
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec
import redis.asyncio
from sqlalchemy.ext.asyncio import AsyncEngine

import gateway
from gateway.bookkeeping.spend_reader import PostgresBooks
from gateway.cli.identity.keys import keys
from gateway.db import create_engine
from gateway.limits.ceilings import Ceilings
from gateway.limits.limiter import Limiter
from gateway.limits.outcomes import Admission, Refusal, Units, scopes_of
from gateway.principal import Plan
from gateway.settings.file import SettingsError
from gateway.settings.load import load
from migrations.runner import migrate
from tests.gateway.limits.test_limiter_days import SCOPE, WHO, it_was, used
from tests.gateway.routes.admin.conftest import World, open_world

MODEL = "far"
CONFIG = f"""
[[model]]
name = "{MODEL}"
upstream = "http://127.0.0.1:9/v1"
[plan.default]
requests_per_day = 100
weighted_tokens_per_minute = 600
"""


def check_the_settings(folder: Path) -> None:
    file = folder / "bad.toml"
    file.write_text(CONFIG.replace("= 100", "= -1"))
    try:
        load({"home": folder / "home", "config": file}, {})
    except SettingsError as error:
        assert "plan.default.requests_per_day: expected `int` >= 0" in str(error), error
    else:
        raise AssertionError("it was taken")


async def check_plans(world: World) -> None:
    """The plan of the settings is stored and shown; one is made, changed, and refused by name."""
    path = "/v1/admin/plans"
    shown = (await world.call("GET", f"{path}/default")).json()
    assert (shown["requests_per_day"], shown["weighted_tokens_per_minute"]) == (100, 600), shown
    made = await world.call("POST", path, {"name": "silver", "requests_per_day": 5})
    assert made.status_code == 201 and made.json()["requests_per_day"] == 5, made.text
    change = {"requests_per_day": None, "weighted_tokens_per_minute": 7}
    changed = (await world.call("PATCH", f"{path}/silver", change)).json()
    assert {name: changed[name] for name in change} == change, changed
    refused = await world.call("POST", path, {"name": "bad", "weighted_tokens_per_minute": -1})
    assert refused.status_code == 400 and "weighted_tokens_per_minute" in refused.text


async def check_projects(world: World, project_id: str) -> None:
    """A project has the one that OpenAI has a name for."""
    path = f"/v1/organization/projects/{project_id}/rate_limits/rl-{MODEL}"
    shown = (await world.call("POST", path, {"max_requests_per_1_day": 3})).json()
    assert shown["max_requests_per_1_day"] == 3, shown


async def refusal(world: World, project_id: str, limits: dict[str, Any]) -> dict[str, str]:
    """Return the error that a request with a new key meets."""
    body = {"name": "k", "project_id": project_id, **limits}
    made = await world.call("POST", "/v1/admin/keys", body)
    assert made.status_code == 201 and limits.items() <= made.json().items(), made.text
    answer = await world.call(
        "POST",
        "/v1/chat/completions",
        {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
        key=made.json()["value"],
    )
    assert answer.status_code == 429, answer.text
    assert answer.headers["x-ratelimit-limit-weighted-tokens"], "a minute's is told"
    error: dict[str, str] = answer.json()["error"]
    return error


async def check_refusals(world: World, project_id: str) -> None:
    """Check that a refusal names its limit, of a key and of a key and a model."""
    error = await refusal(world, project_id, {"requests_per_day": 0, "plan": "default"})
    assert "this key on requests per day (RPD): limit 0." in error["message"], error
    assert error["type"] == "daily_requests"
    of_model = {"model_limits": {MODEL: {"weighted_tokens_per_minute": 1}}}
    error = await refusal(world, project_id, of_model)
    assert "key and model on weighted tokens per minute: limit 1." in error["message"], error
    assert error["type"] == "weighted_tokens"


async def check_alerts(world: World) -> None:
    principal = await world.services.authenticator.authenticate(world.api_key)
    ceilings = Ceilings(world.db)
    scopes = scopes_of(principal, MODEL, "interactive")
    ceilings.note(principal.org_id, scopes, Units(output_tokens=150), Units())
    await ceilings.flush()
    (alert, *_) = (await world.call("GET", "/v1/admin/alerts")).json()["data"]
    assert alert["measure"] == "weighted_tokens_per_minute", alert


async def check_a_loss_of_data(db: AsyncEngine, redis_url: str) -> None:
    """A limit by the day begins with what the books say: two requests, of which one was a batch."""
    for lane in ("interactive", "batch"):
        await used(db, 10, 0.0, lane=lane)
    three = {"requests_per_day": 3, "batch_tokens_per_day": 100}
    who = msgspec.structs.replace(WHO, project_plan=Plan(name="p", **three))
    async with redis.asyncio.from_url(redis_url) as store:
        await store.flushdb()
        limiter = Limiter(store, ever_used=it_was, books=PostgresBooks(db))
        found = [
            await limiter.admit(
                who, "m", input_tokens=1, max_output_tokens=0, lease_id=f"l-{n}", lane="batch"
            )
            for n in range(2)
        ]
        assert isinstance(found[0], Admission), found
        assert isinstance(found[1], Refusal) and found[1].kind == "daily_requests", found
        assert {*await store.keys("*:day:*")} == {f"{SCOPE}:day:{each}".encode() for each in "dq"}
        await limiter.close()


async def main(folder: Path, database_url: str, redis_url: str) -> None:
    assert Path(gateway.__file__).is_relative_to(folder), "the copy is tried, not the product"
    await migrate(database_url)
    check_the_settings(folder)
    options = {option for each in keys.commands["create"].params for option in each.opts}
    assert "--requests-per-day" in options and "--weighted-tokens-per-minute" not in options
    db = create_engine(database_url)
    async with open_world(folder, CONFIG, db, database_url, redis_url) as world:
        project_id = (await world.call("POST", "/v1/admin/projects", {"name": "web"})).json()["id"]
        await check_plans(world)
        await check_refusals(world, project_id)
        await check_projects(world, project_id)
        await check_alerts(world)
    await check_a_loss_of_data(db, redis_url)
    await db.dispose()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
