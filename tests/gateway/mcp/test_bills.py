"""Calls of MCP servers through a worker as it runs: each is on the bill once, within the limits and
the money of whoever makes it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from mcp import Client
from mcp.shared.exceptions import MCPError
from openai import OpenAI

from billing.reconciliation.checks import check_ledger
from gateway.db import tenant
from gateway.mcp.known import announce
from gateway.mcp.rules import replace_rules
from gateway.tenancy.keys.keys import create_key
from mcp_bridge.protocol.rpc import APPROVAL_NEEDED, DENIED, LIMITED
from mcp_bridge.trust.policy import SpendLimit, ToolRule
from tests.databases import Databases
from tests.gateway.routes.openapi.fresh import fresh_worker, mcp_client
from tests.gateway.routes.openapi.running import ACTOR, TIMEOUT_S, Running
from tests.gateway.tools.scripted import core, script
from tests.mcp_bridge.counting import Counting, counting

pytestmark = pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")
PRICE_PICO = 20_000_000_000
LOST = ("nobody__*", "look", "x*")
CONFIG = """
[plan.one]
requests_per_minute = 6
[plan.two]
requests_per_minute = 12

[[mcp.servers]]
name = "paid"
url = "URL"
network = "loopback"
trust = "all"

[[mcp.servers]]
name = "other"
url = "URL"
network = "loopback"
trust = "all"

[[mcp.servers]]
name = "pinned"
url = "URL/pinned"
network = "loopback"

[[mcp.servers]]
name = "gone"
url = "http://127.0.0.1:9/mcp"
network = "loopback"
"""
BOOK = """
[[price]]
model = "mcp"
valid_from = "2020-01-01"
tool_call = "0.01"
[[price]]
model = "mcp/paid"
valid_from = "2020-01-01"
tool_call = "0.02"
"""


class World(msgspec.Struct, frozen=True):
    worker: Running
    server: Counting


@pytest.fixture(scope="module")
def world(
    databases: Databases, redis_server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    folder: Path = tmp_path_factory.mktemp("calls")
    book = folder / "home" / "price_books" / "calls.toml"
    book.parent.mkdir(parents=True)
    book.write_text(BOOK)
    with counting() as server:
        more = CONFIG.replace("URL", server.url)
        given = {"core": core(), "more": more}
        with fresh_worker(databases, redis_server_url, folder, **given) as found:
            made = World(found, server)
            # Redis learns of the org before it has used anything: later its limits begin empty.
            asyncio.run(calls_by(made, new_key(made, plan="one")[1], ["other__look"]))
            yield made


def new_key(
    world: World, plan: str | None = None, scopes: Sequence[str] = ("mcp:call",)
) -> tuple[str, str]:
    """Its id and its secret."""
    worker, services = world.worker, world.worker.services

    async def work() -> tuple[str, str]:
        pepper_id, pepper = services.authenticator.pepper
        async with tenant(services.db, worker.org_id) as conn:
            made = await create_key(
                conn,
                org_id=worker.org_id,
                project_id=worker.project_id,
                name="caller",
                scopes=scopes,
                plan=plan,
                pepper=pepper,
                pepper_id=pepper_id,
                actor=ACTOR,
            )
        return made.row.id, made.secret

    return worker.run(work())


@asynccontextmanager
async def client_of(world: World, secret: str, mode: Any = "auto") -> AsyncIterator[Client]:
    async with mcp_client(world.worker, secret, mode) as client:
        yield client


async def call(client: Client, name: str) -> Any:
    """Return the result: its error's code and data, or whether the tool says that it failed."""
    try:
        found = await client.call_tool(name, {})
    except MCPError as error:
        return error.error.code, error.error.data
    return found.is_error


async def calls_by(world: World, secret: str, names: list[str]) -> list[Any]:
    async with client_of(world, secret) as client:
        return [await call(client, name) for name in names]


EVENTS = sa.text(
    "SELECT model, tool_call, tool_call_pico, finish, lane FROM usage_events"
    " WHERE key = :key ORDER BY id"
)


RECORDED = sa.text(
    "SELECT action, after FROM audit_entries WHERE actor_id = :key AND action LIKE 'mcp.%'"
    " AND action <> 'mcp.listed' ORDER BY sequence"
)


def audited(world: World, key_id: str, count: int = 3) -> list[tuple[str, Any]]:
    """Return the audit entries of a key's requests, without lists."""

    async def read() -> list[Any]:
        async with world.worker.services.system_db.connect() as conn:
            return list((await conn.execute(RECORDED, {"key": key_id})).all())

    deadline = time.monotonic() + TIMEOUT_S
    while len(found := world.worker.run(read())) < count:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return [(row.action, msgspec.json.decode(row.after)) for row in found]


def booked(world: World, key_id: str, count: int) -> list[Any]:
    async def read() -> list[Any]:
        async with world.worker.services.system_db.connect() as conn:
            return list((await conn.execute(EVENTS, {"key": key_id})).all())

    deadline = time.monotonic() + TIMEOUT_S
    while len(found := world.worker.run(read())) < count:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


@pytest.mark.parametrize("mode", ["legacy", "auto"])
def test_the_bill_is_the_calls(world: World, mode: str) -> None:
    """Each that a server has answered, with whatever it said; no list, nothing that did not go out
    and nothing that broke."""
    key_id, secret = new_key(world)

    async def calls() -> list[Any]:
        async with client_of(world, secret, mode) as client:
            await client.list_tools()
            names = ("paid__look", "paid__fail", "paid__break", "paid__none", "other__look")
            return [await call(client, name) for name in names]

    said = asyncio.run(calls())
    assert (said[0], said[1], said[4]) == (False, True, False)
    assert said[2][0] == -32000 and said[3][0] == -32602
    found = [tuple(row) for row in booked(world, key_id, 3)]
    assert found == [
        ("mcp/paid", 1, PRICE_PICO, "done", "agentic"),
        ("mcp/paid", 1, PRICE_PICO, "done", "agentic"),
        ("mcp/other", 1, PRICE_PICO // 2, "done", "agentic"),
    ]
    costs = world.worker.session.get(
        f"{world.worker.url}/v1/organization/costs",
        params={"start_time": int(time.time()) - 86_400, "group_by": ["line_item", "api_key_id"]},
        headers={"authorization": f"Bearer {world.worker.everything}"},
        timeout=TIMEOUT_S,
    ).json()
    results = [row for bucket in costs["data"] for row in bucket["results"]]
    items = {row["line_item"]: row["quantity"] for row in results if row["api_key_id"] == key_id}
    assert items == {"mcp/paid, tool_calls": 2, "mcp/other, tool_calls": 1}
    usage = world.worker.session.get(
        f"{world.worker.url}/v1/organization/usage/completions",
        params={"start_time": int(time.time()) - 86_400, "api_key_ids": [key_id]},
        headers={"authorization": f"Bearer {world.worker.everything}"},
        timeout=TIMEOUT_S,
    ).json()
    assert [row for bucket in usage["data"] for row in bucket["results"]] == []


def test_requests_per_minute_are_calls_too(world: World) -> None:
    key_id, secret = new_key(world, plan="one")
    before = len(world.server.called)

    first, *others = asyncio.run(calls_by(world, secret, ["paid__look"] * 3))
    assert first is False
    for code, data in others:
        assert (code, data["reason"], data["scope"]) == (LIMITED, "rate_limit_exceeded", "key")
        assert data["kind"] == "requests" and 0 < data["retryAfterSeconds"] <= 10
    assert world.server.called[before:] == ["look"]
    assert len(booked(world, key_id, 1)) == 1


def test_a_prompt_is_a_request_that_costs_nothing_and_is_on_record(world: World) -> None:
    key_id, secret = new_key(world, plan="one")
    before = len(world.server.called)

    async def get_two() -> list[Any]:
        async with client_of(world, secret) as client:
            said = [await client.get_prompt("paid__hello")]
            with pytest.raises(MCPError) as refused:
                await client.get_prompt("paid__hello")
            return [*said, refused.value.error, await call(client, "paid__look")]

    said, error, called = asyncio.run(get_two())
    assert said.messages == [] and error.code == called[0] == LIMITED
    assert error.data["reason"] == "rate_limit_exceeded"
    assert world.server.called[before:] == ["hello"]
    log = audited(world, key_id)
    assert {"method": "prompts/get", "name": "hello"}.items() <= log[0][1].items()
    assert log[0][0] == "mcp.read" and log[0][1]["outcome"] == "done"
    refused = [
        {"method": "prompts/get", "name": "hello", "reason": error.data["reason"], "rules": []},
        {"tool": "look", "reason": error.data["reason"], "rules": []},
    ]
    assert [each for action, each in log if action == "mcp.denied"] == refused
    assert booked(world, key_id, 0) == []


def test_a_hard_cap_holds_what_a_call_costs(world: World) -> None:
    """Two of three at 0.02 fit under 0.05, and what breaks gives back what was held for it."""
    key_id, secret = new_key(world)
    cap = {"key_id": key_id, "period": "total", "amount_usd": "0.05"}
    world.worker.post("/v1/admin/spend-caps", **cap)
    names = ["paid__break", "paid__look", "paid__break", "paid__look", "paid__look", "other__look"]

    said = asyncio.run(calls_by(world, secret, names))
    assert [said[n] for n in (1, 3, 5)] == [False] * 3  # the last of them costs 0.01
    code, data = said[4]
    assert (code, data["reason"], data["scope"]) == (LIMITED, "insufficient_quota", "key")
    assert len(booked(world, key_id, 3)) == 3


def test_a_rules_budget_is_what_calls_have_cost(world: World) -> None:
    key_id, secret = new_key(world)
    worker, services = world.worker, world.worker.services
    bound = ToolRule(
        id="bound",
        effect="allow",
        level="key",
        of=key_id,
        budget=SpendLimit(amount_pico=5 * PRICE_PICO // 2, window_s=3600),
    )

    async def rule(*rules: ToolRule) -> None:
        async with tenant(services.db, worker.org_id) as conn:
            await replace_rules(conn, org_id=worker.org_id, rules=rules, actor=ACTOR)
        await announce(services.redis, worker.org_id)

    async def until_known() -> None:
        async with client_of(world, secret) as client, asyncio.timeout(TIMEOUT_S):
            while (await call(client, "other__break"))[0] != DENIED:
                await asyncio.sleep(0.02)

    names = ["paid__look", "paid__break", "paid__fail", "paid__look", "other__look", "other__look"]
    never = ToolRule(id="never", effect="deny", tools=("other__break",))
    worker.run(rule(ToolRule(id="all", effect="allow"), bound, never))
    try:
        asyncio.run(until_known())
        said = asyncio.run(calls_by(world, secret, names))
    finally:
        worker.run(rule())
    assert [said[n] for n in (0, 2, 4)] == [False, True, False]
    for n in (3, 5):
        code, data = said[n]
        assert (code, data["reason"], data["rules"]) == (DENIED, "budget", ["bound"])
    assert len(booked(world, key_id, 3)) == 3


def test_a_call_goes_out_once_when_an_administrator_says_yes(world: World) -> None:
    """Rules and answers by the API; who asks cannot answer, whatever its key may do."""
    key_id, secret = new_key(world, scopes=["mcp:call", "admin:mcp"])
    base = f"{world.worker.url}/v1/admin/mcp"

    def ask(method: str, path: str, key: str = world.worker.everything, **more: Any) -> Any:
        headers = {"authorization": f"Bearer {key}"}
        return world.worker.session.request(
            method, base + path, headers=headers, timeout=TIMEOUT_S, **more
        )

    rules = [
        {"id": "all", "effect": "allow", "tools": ["*"]},
        {"id": "looks", "effect": "ask", "tools": ["paid__look"], "level": "key", "of": key_id},
    ]
    changed = ask("PUT", "/rules", json={"rules": rules})
    assert changed.ok and ask("GET", "/rules").json() == changed.json(), changed.text
    odd = [
        {"id": "all", "effect": "allow", "tools": ["*", "pa*", "[op]*__look", "paid__*"]},
        {"id": "lost", "effect": "deny", "tools": ["nobody__*", "look", "paid__look", "x*"]},
        {"id": "of", "effect": "deny", "level": "project", "of": key_id},
    ]
    warned = ask("PUT", "/rules", json={"rules": odd})
    assert warned.json()["warnings"] == [
        *(f"rule 'lost': no server is configured that {glob!r} names" for glob in LOST),
        f"rule 'of': there is no project {key_id!r}",
    ]
    assert warned.headers["etag"] == ask("GET", "/rules").headers["etag"]
    changed = ask("PUT", "/rules", json={"rules": rules})
    bad = ask("PUT", "/rules", json={"rules": [{"id": "a", "effect": "deny", "when": "args."}]})
    assert bad.status_code == 400 and "when" in bad.text
    try:
        until = time.monotonic() + TIMEOUT_S
        while (said := asyncio.run(calls_by(world, secret, ["paid__look"]))[0]) is False:
            assert time.monotonic() < until
        before = len(world.server.called)
        code, data = said
        assert (code, data["reason"]) == (APPROVAL_NEEDED, "approval_required")
        path = f"/approvals/{data['approvalId']}"
        shown = ask("GET", path).json()
        assert (shown["state"], shown["tool"], shown["client_id"]) == ("pending", "look", key_id)
        listed = ask("GET", "/approvals?state=pending").json()["data"]
        assert data["approvalId"] in [each["id"] for each in listed]
        asked = ask("GET", f"{path}/arguments").json()
        assert (asked["approval_id"], asked["arguments"]) == (data["approvalId"], {})
        assert ask("POST", f"{path}/approve", secret).status_code == 403
        assert ask("POST", f"{path}/approve").json()["state"] == "approved"
        assert ask("POST", f"{path}/deny").status_code == 409
        assert ask("GET", f"{path}/arguments").status_code == 404, "it is decided"
        first, second = asyncio.run(calls_by(world, secret, ["paid__look"] * 2))
        assert first is False and second[0] == APPROVAL_NEEDED
        assert second[1]["approvalId"] != data["approvalId"]
        assert world.server.called[before:] == ["look"]
        assert ask("GET", path).json()["state"] == "used"
        other = f"/approvals/{second[1]['approvalId']}"
        assert ask("POST", f"{other}/deny").json()["state"] == "denied"
        assert ask("POST", "/approvals/mcpapp_none/deny").status_code == 404
    finally:
        assert ask("PUT", "/rules", json={"rules": []}).ok


def test_an_administrator_approves_what_was_looked_at_and_nothing_else(world: World) -> None:
    """By the API alone; what changes between the look and the yes gets none."""
    _, secret = new_key(world)
    base = f"{world.worker.url}/v1/admin/mcp/servers"

    def ask(method: str, path: str, key: str = world.worker.everything, **more: Any) -> Any:
        headers = {"authorization": f"Bearer {key}", **more.pop("headers", {})}
        return world.worker.session.request(
            method, base + path, headers=headers, timeout=TIMEOUT_S, **more
        )

    def states() -> dict[str, str]:
        return {one["name"]: one["state"] for one in ask("GET", "").json()["data"]}

    assert (states()["paid"], states()["pinned"]) == ("trusted", "unapproved")
    assert ask("GET", "/pinned", secret).status_code == 403
    assert ask("GET", "/nobody").status_code == 404
    gone = ask("GET", "/gone").json()
    assert (gone["state"], gone["changes"]) == ("unreachable", []) and gone["problem"]
    assert ask("POST", "/gone/approve", json={"all": True}).status_code == 409
    assert ask("GET", "/paid").json()["state"] == "trusted"

    before = world.server.tools
    shown = ask("GET", "/pinned")
    offer = shown.json()
    names = {(one["kind"], one["name"], one["state"]) for one in offer["changes"]}
    assert {("tool", "look", "new"), ("tool", "hold", "new")} < names
    assert (offer["state"], offer["waiting"]) == ("waiting", len(offer["changes"]))
    for bad in ({}, {"all": True, "tools": ["look"]}, {"tools": []}, {"tools": ["no"]}):
        assert ask("POST", "/pinned/approve", json=bad).status_code == 400, bad
    seen = {"If-Match": shown.headers["etag"]}
    try:
        world.server.tools = [{**before[0], "description": "another"}, *before[1:]]
        refused = ask("POST", "/pinned/approve", json={"tools": ["look"]}, headers=seen)
        assert refused.status_code == 412 and states()["pinned"] == "unapproved"
        world.server.tools = before
        made = ask("POST", "/pinned/approve", json={"tools": ["look"]}, headers=seen)
        assert made.ok, made.text
        assert made.json()["approved"] == 2  # the tool, and how the server is reached
        assert states()["pinned"] == "approved"
        until = time.monotonic() + TIMEOUT_S
        while asyncio.run(calls_by(world, secret, ["pinned__look"])) != [False]:
            assert time.monotonic() < until
        world.server.tools = [{**before[0], "description": "another"}]
        (change,) = (one for one in ask("GET", "/pinned").json()["changes"] if one["was"])
        assert (change["state"], change["name"]) == ("changed", "look")
        said = [(one["path"], one["was"]) for one in change["differences"]]
        assert said == [("/description", None)]
        gone_now = ask("POST", "/pinned/revoke", json={"tools": ["look"]})
        assert gone_now.json()["approved"] == 1, gone_now.text
        assert ask("POST", "/pinned/revoke", json={"tools": ["look"]}).status_code == 404
    finally:
        world.server.tools = before


LOOK: Any = ("paid__look", {})
TOOL: Any = {"type": "mcp", "server_label": "paid", "require_approval": "never"}


def looped(world: World, secret: str, *rounds: list[Any]) -> Any:
    with OpenAI(api_key=secret, base_url=f"{world.worker.url}/v1", max_retries=0) as client:
        return client.responses.create(model="near", input=script(*rounds), tools=[TOOL])


def test_calls_of_a_loop_are_billed_beside_its_rounds(world: World) -> None:
    key_id, secret = new_key(world, scopes=["inference", "mcp:call"])
    made = looped(world, secret, [LOOK, LOOK], [LOOK])
    assert made.status == "completed"
    models = [row.model for row in booked(world, key_id, 6)]
    assert sorted(models) == ["mcp/paid"] * 3 + ["near"] * 3


def test_a_rate_limit_amid_a_loop_ends_it_with_what_was_done(world: World) -> None:
    """Two requests: a round and a call."""
    key_id, secret = new_key(world, plan="two", scopes=["inference", "mcp:call"])
    made = looped(world, secret, [LOOK])
    assert made.status == "incomplete"
    assert made.incomplete_details.reason == "rate_limit_exceeded"
    call = made.output[-1]
    assert (call.type, call.status, call.output) == ("mcp_call", "completed", "all is well")
    assert sorted(row.model for row in booked(world, key_id, 2)) == ["mcp/paid", "near"]


def test_a_cap_amid_a_loop_is_told_to_the_model(world: World) -> None:
    """One call fits, the second does not; the rounds cost next to nothing."""
    key_id, secret = new_key(world, scopes=["inference", "mcp:call"])
    world.worker.post("/v1/admin/spend-caps", key_id=key_id, period="total", amount_usd="0.035")
    made = looped(world, secret, [LOOK], [LOOK])
    calls = [item for item in made.output if item.type == "mcp_call"]
    assert [call.status for call in calls] == ["completed", "failed"]
    assert calls[1].error.code == LIMITED and "budget" in calls[1].error.message
    assert made.status == "completed"
    models = [row.model for row in booked(world, key_id, 4)]
    assert sorted(models) == ["mcp/paid", *["near"] * 3]


def test_the_books_agree(world: World) -> None:
    """Behind all others."""

    assert world.worker.run(check_ledger(world.worker.services.system_db)) == []
