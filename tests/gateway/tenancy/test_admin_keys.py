"""/v1/admin/keys over HTTP: a key's whole life, who may do what to it, and the secret that appears
once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import openai
import pytest
import redis.asyncio

from gateway.auth.bearer import api_keys
from gateway.ids import uuid7
from tests.databases import Databases
from tests.gateway.whole_app import MODELS, World, make_tenant, world
from tests.pace import within
from tests.shared_application import in_one_task, on_one_loop, stores_of_its_own

pytestmark = pytest.mark.asyncio(loop_scope="session")

KEYS = "/v1/admin/keys"


@on_one_loop(scope="module")
async def application(
    databases: Databases, redis_server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[World, str]]:
    """The application of all tests here, and the URL of its Postgres."""
    async with stores_of_its_own(databases, redis_server_url) as (url, redis_url):
        store = redis.asyncio.from_url(redis_url)
        async with in_one_task(world(url, store, tmp_path_factory.mktemp("home"))) as found:
            yield found, url
        await store.aclose()


@on_one_loop()
async def here(application: tuple[World, str]) -> World:
    """The application, with two organizations of this test alone."""
    shared, url = application
    name = uuid7().hex
    return msgspec.structs.replace(
        shared,
        acme=await make_tenant(url, f"acme-{name}", is_operator=True),
        other=await make_tenant(url, f"other-{name}", is_operator=False),
    )


async def make(here: World, **fields: Any) -> dict[str, Any]:
    body = {"name": "k", "project_id": here.acme.project_id, **fields}
    answer = await here.call("POST", KEYS, here.acme.admin, body)
    assert answer.status_code == 201, answer.text
    assert answer.headers["cache-control"] == "no-store"
    found: dict[str, Any] = answer.json()
    return found


async def until(here: World, key: str, status: int) -> httpx.Response:
    """Wait until `key` gets this status, within the promised second, and return the answer."""
    async with within(1.0):
        while True:
            answer = await here.call("GET", "/v1/models", key)
            if answer.status_code == status:
                return answer
            await asyncio.sleep(0.01)


async def until_listed(here: World, key: str, models: list[str]) -> None:
    """Wait until `key` is shown these models, within the promised second."""
    async with within(1.0):
        while True:
            found = (await until(here, key, 200)).json()["data"]
            if [model["id"] for model in found] == models:
                return
            await asyncio.sleep(0.01)


async def test_a_keys_life(here: World) -> None:
    made = await make(here, scopes=["inference", "usage:read"], tokens_per_minute=9)
    path, secret = f"{KEYS}/{made['id']}", made["value"]
    assert made["redacted_value"] == f"sk-tg-...{secret[-4:]}"
    assert (made["tokens_per_minute"], made["models"], made["owner"]) == (9, None, None)
    await until(here, secret, 200)

    shown = await here.call("GET", path, here.acme.admin)
    assert "value" not in shown.json() and secret not in shown.text
    assert shown.json() == {name: v for name, v in made.items() if name != "value"}
    assert shown.headers["etag"]

    until_s = int(time.time()) + 3600
    changes = {"name": "desk", "models": ["big", "gone"], "expires_at": until_s, "lane": "batch"}
    updated = await here.call(
        "PATCH", path, here.acme.admin, changes, headers={"if-match": shown.headers["etag"]}
    )
    assert updated.status_code == 200, updated.text
    assert updated.json() == shown.json() | changes
    stale = await here.call(
        "PATCH", path, here.acme.admin, {"name": "x"}, headers={"if-match": shown.headers["etag"]}
    )
    assert stale.status_code == 412 and stale.json()["code"] == "precondition_failed"

    rotated = await here.call("POST", f"{path}/rotate", here.acme.admin, {"grace_s": 60})
    assert rotated.status_code == 200, rotated.text
    fresh = rotated.json()["value"]
    assert rotated.json()["previous"]["redacted_value"] == made["redacted_value"]
    for each in (secret, fresh):
        await until_listed(here, each, ["big"])

    revoked = await here.call("POST", f"{path}/revoke", here.acme.admin)
    assert revoked.status_code == 200 and revoked.json()["revoked_at"]
    for each in (secret, fresh):
        refused = await until(here, each, 401)
        assert refused.json()["error"]["code"] == "invalid_api_key"
    again = await here.call("POST", f"{path}/revoke", here.acme.admin)
    assert again.json()["revoked_at"] == revoked.json()["revoked_at"]
    late = await here.call("POST", f"{path}/rotate", here.acme.admin)
    assert late.status_code == 400 and late.json()["param"] == "key"


async def test_what_a_key_may_not_use_is_as_good_as_unknown(here: World) -> None:
    made = await make(here, models=["big"])
    of_project = f"/v1/organization/projects/{here.acme.project_id}/model_permissions"
    chat = {"messages": [{"role": "user", "content": "hi"}]}

    async def asked(model: str) -> tuple[int, Any]:
        body = {"model": model, **chat}
        post = await here.call("POST", "/v1/chat/completions", made["value"], body)
        get = await here.call("GET", f"/v1/models/{model}", made["value"])
        assert (post.status_code, get.status_code) == (404, 404)
        assert post.json() == get.json()
        return post.status_code, post.json()["error"]

    for model in ("penny", "nowhere"):
        status, error = await asked(model)
        assert error["code"] == "model_not_found" and error["param"] == "model"
        assert error["message"] == (
            f"The model `{model}` does not exist or you do not have access to it."
        )
    assert (await here.call("GET", "/v1/models/big", made["value"])).status_code == 200
    wanted = {"mode": "deny_list", "model_ids": ["big"]}
    assert (await here.call("POST", of_project, here.acme.admin, wanted)).status_code == 200
    async with within(1.0):
        while (await here.call("GET", "/v1/models", made["value"])).json()["data"]:
            await asyncio.sleep(0.01)
    await asked("big")


async def test_the_sdks_model_permissions(here: World) -> None:
    http = openai.DefaultAsyncHttpxClient(
        transport=openai_transport(here), base_url="http://test/v1"
    )
    client = openai.AsyncOpenAI(
        base_url="http://test/v1", api_key="-", admin_api_key=here.acme.admin, http_client=http
    )
    permissions = client.admin.organization.projects.model_permissions
    found = await permissions.retrieve(here.acme.project_id)
    assert (found.object, found.mode) == ("project.model_permissions", "deny_list")
    assert found.api_model_ids == []
    wanted = await permissions.update(
        here.acme.project_id, mode="allow_list", model_ids=["penny", "big"]
    )
    assert (wanted.mode, wanted.api_model_ids) == ("allow_list", ["big", "penny"])
    listed = await here.call("GET", "/v1/models", here.acme.key)
    async with within(1.0):
        while len(listed.json()["data"]) == len(MODELS):
            listed = await here.call("GET", "/v1/models", here.acme.key)
    assert [each["id"] for each in listed.json()["data"]] == ["penny", "big"]
    gone = await permissions.delete(here.acme.project_id)
    assert (gone.object, gone.deleted) == ("project.model_permissions.deleted", True)
    assert (await permissions.retrieve(here.acme.project_id)).mode == "deny_list"
    with pytest.raises(openai.NotFoundError):
        await permissions.retrieve(here.other.project_id)
    with pytest.raises(openai.BadRequestError) as refused:
        await permissions.update(here.acme.project_id, mode="allow_list", model_ids=["a\x00"])
    assert refused.value.param == "model_ids[0]"
    await client.close()


def openai_transport(here: World) -> Any:
    """The SDK has its own httpx; only its shape is common."""
    import httpx2

    return httpx2.ASGITransport(app=here.app)  # type: ignore[arg-type]


async def test_lists_are_paged_by_id(here: World) -> None:
    ids = [(await make(here, name=f"k{n}"))["id"] for n in range(5)]
    seen: list[str] = []
    after = ""
    for _ in range(10):
        answer = await here.call("GET", f"{KEYS}?limit=2{after}", here.acme.admin)
        page = answer.json()
        seen += [each["id"] for each in page["data"]]
        assert page["first_id"] == page["data"][0]["id"]
        after = f"&after={page['last_id']}"
        if not page["has_more"]:
            break
    assert seen[-5:] == ids and len(seen) == 7 and seen == sorted(seen)
    backwards = await here.call(
        "GET", f"{KEYS}?order=desc&limit=2&project_id={here.acme.project_id}", here.acme.admin
    )
    assert [each["id"] for each in backwards.json()["data"]] == ids[:2:-1]
    nothing = await here.call("GET", f"{KEYS}?project_id=proj_none", here.acme.admin)
    assert nothing.json()["data"] == []


async def test_another_tenants_key_is_not_there(here: World) -> None:
    made = await make(here)
    path = f"{KEYS}/{made['id']}"
    for method, where, body in (
        ("GET", path, None),
        ("PATCH", path, {"name": "x"}),
        ("POST", f"{path}/rotate", {}),
        ("POST", f"{path}/revoke", None),
        ("POST", KEYS, {"name": "x", "project_id": here.acme.project_id}),
        ("GET", f"{KEYS}/no%00key", None),
    ):
        answer = await here.call(method, where, here.other.admin, body)
        assert answer.status_code == 404, (method, where)
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["code"] == "not_found"
    await until(here, made["value"], 200)


async def test_nobody_gives_or_takes_more_than_he_has(here: World) -> None:
    clerk = await make(here, scopes=["admin:keys"])
    strong = await make(here, scopes=["admin:*"])
    for scopes in (["admin:*"], ["admin:members"], ["usage:read"], ["operator:orgs"]):
        body = {"name": "x", "project_id": here.acme.project_id, "scopes": scopes}
        answer = await here.call("POST", KEYS, clerk["value"], body)
        assert answer.status_code == 403, scopes
        assert answer.json()["code"] == "insufficient_permissions"
    for method, rest, body in (
        ("PATCH", "", {"name": "x"}),
        ("POST", "/rotate", {}),
        ("POST", "/revoke", None),
    ):
        answer = await here.call(method, f"{KEYS}/{strong['id']}{rest}", clerk["value"], body)
        assert answer.status_code == 403, (method, rest)
    weak = await make(here)
    widened = await here.call(
        "PATCH", f"{KEYS}/{weak['id']}", clerk["value"], {"scopes": ["inference", "usage:read"]}
    )
    assert widened.status_code == 403
    body = {"name": "x", "project_id": here.acme.project_id, "scopes": ["inference", "mcp:call"]}
    assert (await here.call("POST", KEYS, clerk["value"], body)).status_code == 201
    assert (await here.call("GET", KEYS, weak["value"])).status_code == 403
    assert (await here.call("GET", KEYS, None)).status_code == 401


MISTAKES: list[Any] = [
    ({"scopes": []}, "scopes"),
    ({"scopes": ["openid"]}, "scopes"),
    ({"plan": "none"}, "plan"),
    ({"plan": "a\x00"}, "plan"),
    ({"project_id": None}, "project"),
    ({"project_id": "proj_none"}, "project"),
    ({"user_id": "user_none"}, "user_id"),
    ({"expires_at": 1}, "expires_at"),
    ({"expires_at": 10**15}, "expires_at"),
    ({"expires_at": "soon"}, "expires_at"),
    ({"models": []}, "models"),
    ({"ip_ranges": ["10.0.0.1/8"]}, "ip_ranges"),
    ({"ip_ranges": "10.0.0.0/8"}, "ip_ranges"),
    ({"tokens_per_minute": -1}, "tokens_per_minute"),
    ({"model_limits": {"m": {"tokens_per_minute": -1}}}, "model_limits.tokens_per_minute"),
    ({"model_limits": {"m": {"tokens_per_minute": 10**13}}}, "model_limits.tokens_per_minute"),
    ({"model_limits": {"m": {"weight": 1}}}, "model_limits.weight"),
    ({"model_limits": {"m": 9}}, "model_limits"),
    ({"model_limits": {"": {"tokens_per_minute": 1}}}, "model_limits"),
    ({"secret": "mine"}, "secret"),
    ({"lane": "interactive"}, "lane"),
    ({"lane": 1}, "lane"),
]


async def test_a_mistake_is_named(here: World, subtests: pytest.Subtests) -> None:
    for fields, param in MISTAKES:
        with subtests.test(fields=fields, param=param):
            body = {"name": "k", "project_id": here.acme.project_id, **fields}
            answer = await here.call("POST", KEYS, here.acme.admin, body)
            assert answer.status_code in (400, 404), answer.text
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["param"] == param


async def test_a_repeated_request_makes_one_key_and_shows_it_again(here: World) -> None:
    body = {"name": "once", "project_id": here.acme.project_id}
    headers = {"idempotency-key": "abc"}
    first = await here.call("POST", KEYS, here.acme.admin, body, headers=headers)
    again = await here.call("POST", KEYS, here.acme.admin, body, headers=headers)
    assert first.status_code == again.status_code == 201
    assert first.json() == again.json() and again.headers["idempotent-replayed"] == "true"
    listed = (await here.call("GET", KEYS, here.acme.admin)).json()["data"]
    assert [each["name"] for each in listed].count("once") == 1


async def test_a_use_changes_no_tag(here: World) -> None:
    made = await make(here)
    path = f"{KEYS}/{made['id']}"
    before = await here.call("GET", path, here.acme.admin)
    await until(here, made["value"], 200)
    await here.services.last_used.flush()
    after = await here.call("GET", path, here.acme.admin)
    assert before.json()["last_used_at"] is None
    assert abs(after.json()["last_used_at"] - time.time()) < 60
    assert before.headers["etag"] == after.headers["etag"]


async def test_whoever_has_a_key_may_report_it(here: World) -> None:
    made = await make(here)
    await until(here, made["value"], 200)
    unknown = "sk-tg-" + "0" * 43
    for key in (made["value"], made["value"], unknown):
        answer = await here.call("POST", f"{KEYS}/report-leak", None, {"key": key})
        assert (answer.status_code, answer.content) == (204, b""), "it tells nobody"
    await until(here, made["value"], 401)
    shown = await here.call("GET", f"{KEYS}/{made['id']}", here.acme.admin)
    assert shown.json()["revoked_at"]
    audit = await here.call("GET", "/v1/organization/audit_logs?limit=1", here.acme.admin)
    [entry] = audit.json()["data"]
    assert entry["type"] == "api_key.deleted" and "127.0.0.1" in json.dumps(entry["actor"])
    await until(here, here.acme.key, 200)
    for body in ({"key": "sk-proj-abc"}, {"key": 1}, {}, {"key": unknown, "more": 1}):
        answer = await here.call("POST", f"{KEYS}/report-leak", None, body)
        assert answer.status_code == 400
        assert answer.headers["content-type"] == "application/problem+json"


async def test_a_key_is_bound_to_networks(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys, "REFRESH_S", 0.0)
    made = await make(here, ip_ranges=["203.0.113.0/24"])
    refused = await until(here, made["value"], 401)
    assert refused.json()["error"]["code"] == "ip_not_authorized"
    path = f"{KEYS}/{made['id']}"
    wider = {"ip_ranges": ["203.0.113.0/24", "127.0.0.1"]}
    updated = await here.call("PATCH", path, here.acme.admin, wider)
    assert updated.json()["ip_ranges"] == ["203.0.113.0/24", "127.0.0.1/32"]
    await until(here, made["value"], 200)
