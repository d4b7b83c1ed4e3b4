"""A hard cap from its first request to the event that tells of its end, in the whole application: a
scripted upstream, the limiter, the spool, the books, the alert, a webhook on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from standardwebhooks.webhooks import Webhook

from tests.gateway.fleet.upstream.scripted_upstream import Exchange, Upstream, completion
from tests.gateway.routes.admin.conftest import World
from tests.gateway.webhooks.conftest import Receiver, receiver
from tests.pace import LONGEST_S, eventually

__all__ = ["receiver"]

CAPS, ALERTS, WEBHOOKS = "/v1/admin/spend-caps", "/v1/admin/alerts", "/v1/admin/webhooks"
BOOK = """
[[price]]
model = "far"
valid_from = "2020-01-01"
uncached_input = "0.000001"
output = "1"
"""
CONFIG = """
price_books = ["{book}"]
egress_to_loopback = true
[[model]]
name = "far"
upstream = "http://127.0.0.1:{port}/v1"
[plan.default]
requests_per_minute = 6000
"""
WRITES, MAY_WRITE = 20_000, 40_000
"""Tokens written and allowed, at a dollar for a million: four cents are held and two are spent."""


async def answers(exchange: Exchange) -> None:
    usage = {"prompt_tokens": 10, "completion_tokens": WRITES, "total_tokens": WRITES + 10}
    await exchange.answer(completion(usage=usage))


@pytest.fixture
async def config_text(tmp_path: Path) -> AsyncIterator[str]:
    upstream = Upstream()
    upstream.script = answers
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
    book = tmp_path / "book.toml"
    book.write_text(BOOK)
    yield CONFIG.format(book=book, port=server.sockets[0].getsockname()[1])
    server.close()


async def ask(world: World, **headers: str) -> int:
    body = {"model": "far", "messages": [{"role": "user", "content": "Hi"}]}
    body["max_tokens"] = MAY_WRITE
    path = "/v1/chat/completions"
    answer = await world.call("POST", path, body, key=world.api_key, **headers)
    async with asyncio.timeout(LONGEST_S):
        while world.services.generation.open_calls:  # what it held is given back behind its answer
            await asyncio.sleep(0.005)
    if answer.status_code == 429:
        assert answer.json()["error"]["code"] == "insufficient_quota", answer.text
    return answer.status_code


async def test_who_is_refused_by_a_hard_cap_is_told(world: World, receiver: Receiver) -> None:
    hook = {"url": receiver.url, "event_types": ["budget.threshold_reached"]}
    secret = (await world.call("POST", WEBHOOKS, hook)).json()["secret"]
    made = await world.call("POST", CAPS, {"period": "total", "amount_usd": "0.09"})
    cap_id = made.json()["id"]
    async with asyncio.timeout(LONGEST_S):
        said = [await ask(world)]
        while said[-1] == 200:
            said.append(await ask(world))
    assert said == [200] * 3 + [429], "0.06 are spent, and 0.04 no longer there"

    async def told() -> list[Any]:
        found = (await world.call("GET", f"{ALERTS}?order=asc")).json()["data"]
        assert {each["cap_id"] for each in found} <= {cap_id}
        return [each for each in found if each["threshold_percent"] == 100]

    [alert] = await eventually(told)
    assert alert["reason"] == "refused" and alert["limit"]["value"] == "0.09"
    assert await ask(world) == 429

    async def heard() -> list[Any]:
        got = [Webhook(secret).verify(each.body, each.headers) for each in receiver.received]
        return [each["data"] for each in got if each["data"]["threshold_percent"] == 100]

    [event] = await eventually(heard)
    assert (event["alert_id"], event["cap_id"]) == (alert["id"], cap_id)
    assert (event["reason"], event["used"]) == ("refused", alert["used"])


async def test_a_cap_below_what_is_spent_says_so_when_it_is_made_and_when_it_is_lowered(
    world: World,
) -> None:
    assert await ask(world) == 200

    async def spent() -> Any:
        async with world.db.connect() as conn:
            return await conn.scalar(booked)

    booked = sa.text("SELECT count(*) FROM usage_events WHERE output > 0")
    await eventually(spent)

    async def raised() -> list[tuple[int, str]]:
        found = (await world.call("GET", f"{ALERTS}?order=asc")).json()["data"]
        assert {each["used"]["value"] for each in found} <= {"0.02000000001"}
        return [(each["threshold_percent"], each["reason"]) for each in found]

    made = await world.call("POST", CAPS, {"period": "month", "amount_usd": "0.04"})
    assert await raised() == [(50, "spent")]
    path = f"{CAPS}/{made.json()['id']}"
    for amount in ("0.05", "0.022", "1", "0.01"):
        assert (await world.call("PATCH", path, {"amount_usd": amount})).status_code == 200
    assert await raised() == [(50, "spent"), (80, "spent"), (100, "spent")]
    soft = {"period": "total", "amount_usd": "0.03", "hard": False}
    assert (await world.call("POST", CAPS, soft)).status_code == 201
    assert (await raised())[3:] == [(50, "spent")]


async def test_a_budget_of_any_scope_is_told_of_by_its_name(
    world: World, receiver: Receiver
) -> None:
    hook = {"url": receiver.url, "event_types": ["budget.threshold_reached"]}
    secret = (await world.call("POST", WEBHOOKS, hook)).json()["secret"]
    who = await world.services.authenticator.authenticate(world.api_key)
    scopes = {
        "org": {},
        "project": {"project_id": who.project_id},
        "key": {"key_id": who.key_id},
        "model": {"model": "far"},
        "tag": {"tag": "team=search"},
    }
    others = ({"model": "near"}, {"tag": "team=ads"})
    for named in (*scopes.values(), *others):
        soft = {"period": "month", "amount_usd": "0.04", "hard": False, **named}
        assert (await world.call("POST", CAPS, soft)).status_code == 201
    assert await ask(world, x_tollgate_tags="team=search") == 200

    async def heard() -> list[Any]:
        got = [Webhook(secret).verify(each.body, each.headers) for each in receiver.received]
        return got if len(got) >= len(scopes) else []

    found = [each["data"] for each in await eventually(heard)]
    assert {(each["scope"]["type"], each["scope"]["id"]) for each in found} == {
        ("org", who.org_id),
        *((scope, name) for scope, named in scopes.items() for name in named.values()),
    }
    assert {(each["threshold_percent"], each["used"]["value"]) for each in found} == {
        (50, "0.02000000001")
    }
    listed = (await world.call("GET", ALERTS)).json()["data"]
    assert len(listed) == len(scopes)
