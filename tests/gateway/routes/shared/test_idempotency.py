"""Checks that a request repeated under one Idempotency-Key is carried out once: concurrent
duplicates, lost answers, dead workers, in a real application on a real Postgres."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from litestar import Litestar, Request, Response, get, post
from litestar.config.app import AppConfig
from litestar.connection import ASGIConnection
from litestar.datastructures import State
from litestar.handlers import BaseRouteHandler
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.app.create import refuse
from gateway.audit.log import record
from gateway.audit.tables import entries
from gateway.db import ROLE_SYSTEM, ROLE_TENANT, create_engine, tenant
from gateway.principal import Principal
from gateway.request_errors import AnswerLost
from gateway.routes.asgi.response_headers import ResponseHeaders
from gateway.routes.shared import idempotency
from gateway.routes.shared.access import actor_of, needs, services
from gateway.routes.shared.idempotency import IdempotencyLayer, claim_key
from gateway.secret import Secret, SecretKey
from gateway.tenancy import idempotency_keys
from gateway.tenancy.changes import CHANNEL
from gateway.tenancy.errors import ChangeNotAnnounced, NameTaken
from gateway.tenancy.idempotency_keys import Answer, Claim, IdempotencyKeys
from gateway.tenancy.tables import idempotency_keys as table
from gateway.tenancy.tables import orgs
from tests.budget import examples

SECRET = "sk-tg-" + "a" * 43


freezing: dict[str, tuple[asyncio.Event, asyncio.Event]] = {}
"""For each place that freezes: an event set when it did, and one that ends it."""


async def frozen(place: str) -> None:
    """The first who comes there stands still, as its worker's clock does."""
    if place in freezing:
        reached, thawed = freezing.pop(place)
        reached.set()
        await thawed.wait()


async def change(request: Request[Principal, Any, Any], target: str) -> None:
    org_id = request.user.org_id
    async with tenant(services(request).db, org_id) as conn:
        await record(
            conn, org_id=org_id, actor=actor_of(request), action="thing.created", target=target
        )
        await frozen("inside")


@post("/v1/admin/things", opt=needs("admin:keys"))
async def make(request: Request[Principal, Any, Any]) -> Response[bytes]:
    body = json.loads(await request.body() or b"{}")
    await asyncio.sleep(body.get("wait_s", 0))
    await frozen("before")
    if body.get("taken"):
        raise NameTaken("name", "there is one")
    await change(request, "thing_1")
    if body.get("fails"):
        raise RuntimeError("after the commit")
    if body.get("unannounced"):
        raise ChangeNotAnnounced("redis", "saved")
    made = json.dumps({"secret": SECRET}).encode()
    return Response(made, status_code=201, media_type="application/json", headers={"etag": '"1"'})


@post("/v1/organization/things", opt=needs("admin:keys"))
async def make_other(request: Request[Principal, Any, Any]) -> dict[str, str]:
    await change(request, "thing_2")
    return {}


@get("/v1/admin/things", opt=needs("admin:keys"))
async def look(request: Request[Principal, Any, Any]) -> dict[str, str]:
    await change(request, "looked")
    return {}


@post("/v1/things", opt=needs("admin:keys"))
async def elsewhere(request: Request[Principal, Any, Any]) -> dict[str, str]:
    await change(request, "thing_3")
    return {}


async def believe(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    """A guard for whom the header is the credential."""
    org_id, _, key_id = connection.headers["authorization"].partition(" ")
    connection.scope["user"] = Principal(
        org_id=org_id, project_id="", key_id=key_id, key_hint="", scopes=frozenset()
    )


class World:
    """One tenant's view of the application."""

    def __init__(self, http: httpx.AsyncClient, db: AsyncEngine, keys: IdempotencyKeys) -> None:
        self.http, self.db, self.keys = http, db, keys
        self.org_id = ""

    async def post(
        self,
        key: str | None = "k",
        body: dict[str, Any] | None = None,
        *,
        path: str = "/v1/admin/things",
        credential: str = "key_1",
    ) -> httpx.Response:
        headers = {"authorization": f"{self.org_id} {credential}"}
        if key is not None:
            headers["idempotency-key"] = key
        return await self.http.post(path, json=body or {}, headers=headers)

    async def effects(self) -> int:
        async with self.db.connect() as conn:
            counted = sa.select(sa.func.count()).where(entries.c.org_id == self.org_id)
            return int(await conn.scalar(counted) or 0)

    async def rows(self) -> list[Any]:
        async with self.db.connect() as conn:
            return list(await conn.execute(sa.select(table)))

    async def age(self, seconds: float, **values: Any) -> None:
        """Every claim is older than it was."""
        moment = table.c.claimed_at - sa.func.make_interval(0, 0, 0, 0, 0, 0, seconds)
        async with self.db.begin() as conn:
            await conn.execute(sa.update(table).values(claimed_at=moment, **values))


def secret_of(*ids: str) -> Secret:
    """Return a secret of these keys, the current one first."""
    keys = (SecretKey(id=each, secret=(each * 22)[:43] + "=") for each in ids)
    return Secret(version=1, keys=tuple(keys))


@pytest.fixture
async def world(db: AsyncEngine, postgres_url: str, redis: Redis) -> AsyncIterator[World]:
    pools = [create_engine(postgres_url, role=role) for role in (ROLE_TENANT, ROLE_SYSTEM)]
    keys = IdempotencyKeys(db=pools[0], system_db=pools[1], secret=secret_of("s1"))

    def wire(config: AppConfig) -> AppConfig:
        found = SimpleNamespace(db=pools[0], idempotency_keys=keys, trusted_proxies=(), redis=redis)
        config.state = State({"services": found})
        return config

    app = Litestar(
        [make, make_other, look, elsewhere],
        guards=[believe],
        before_request=claim_key,
        exception_handlers={Exception: refuse},
        on_app_init=[wire],
        openapi_config=None,
        logging_config=None,
    )
    app.asgi_handler = ResponseHeaders(IdempotencyLayer(app.asgi_handler))
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        world = World(http, db, keys)
        async with db.begin() as conn:
            await conn.execute(sa.insert(orgs).values(id="org_acme", name="acme"))
        world.org_id = "org_acme"
        yield world
    for pool in pools:
        await pool.dispose()


async def test_a_repetition_gets_the_same_answer_and_no_effect(world: World) -> None:
    first, second = await world.post(), await world.post()
    assert first.status_code == second.status_code == 201
    assert first.content == second.content and SECRET in first.text
    assert second.headers["idempotent-replayed"] == "true"
    assert "idempotent-replayed" not in first.headers
    assert second.headers["etag"] == '"1"'
    assert second.headers["content-type"] == first.headers["content-type"]
    assert second.headers["x-request-id"] != first.headers["x-request-id"]
    assert await world.effects() == 1


async def test_without_a_key_nothing_is_kept(world: World) -> None:
    await world.post(None)
    await world.post(None)
    assert await world.effects() == 2 and await world.rows() == []


async def test_only_posts_of_administration_take_keys(world: World) -> None:
    headers = {"authorization": f"{world.org_id} key_1", "idempotency-key": "k"}
    for _ in range(2):
        assert (await world.http.get("/v1/admin/things", headers=headers)).status_code == 200
        assert (await world.post(path="/v1/things")).status_code == 201
    assert await world.effects() == 4 and await world.rows() == []


async def test_a_key_belongs_to_a_request_and_a_credential(world: World) -> None:
    assert (await world.post()).status_code == 201
    other_body = await world.post(body={"name": "other"})
    other_path = await world.post(path="/v1/organization/things")
    other_query = await world.post(path="/v1/admin/things?x=1")
    for refused in (other_body, other_path, other_query):
        assert refused.status_code == 422
        assert refused.headers["x-should-retry"] == "false"
    assert other_body.json()["code"] == "idempotency_key_reused"
    assert other_body.headers["content-type"] == "application/problem+json"
    assert other_path.json()["error"]["code"] == "idempotency_key_reused"
    assert await world.effects() == 1
    assert (await world.post(credential="key_2", body={"name": "other"})).status_code == 201
    assert (await world.post("k2")).status_code == 201
    assert await world.effects() == 3


async def test_orgs_do_not_meet(world: World, db: AsyncEngine) -> None:
    first = await world.post()
    async with db.begin() as conn:
        await conn.execute(sa.insert(orgs).values(id="org_other", name="other"))
    world.org_id = "org_other"
    second = await world.post()
    assert "idempotent-replayed" not in second.headers and first.status_code == 201
    assert await world.effects() == 1


@pytest.mark.parametrize("key", ["", "a b", "x" * 256, "ä"])
async def test_a_strange_key_is_refused(world: World, key: str) -> None:
    headers = {"authorization": f"{world.org_id} key_1".encode(), "idempotency-key": key.encode()}
    refused = await world.http.post("/v1/admin/things", headers=headers)  # type: ignore[arg-type]
    assert refused.status_code == 400 and refused.json()["param"] == "Idempotency-Key"
    twice = [("authorization", world.org_id), ("idempotency-key", "a"), ("idempotency-key", "b")]
    refused = await world.http.post("/v1/admin/things", headers=twice)
    assert refused.status_code == 400
    assert await world.effects() == 0


async def test_a_failure_lets_go_of_its_key(world: World) -> None:
    refused = await world.post(body={"taken": True})
    assert refused.status_code == 409 and refused.json()["code"] == "name_taken"
    assert await world.rows() == []
    again = await world.post(body={"taken": True})
    assert "idempotent-replayed" not in again.headers


async def test_a_failure_behind_the_commit_is_final(world: World) -> None:
    failed = await world.post(body={"fails": True})
    again = await world.post(body={"fails": True})
    assert failed.status_code == again.status_code == 500
    assert again.headers["idempotent-replayed"] == "true"
    assert await world.effects() == 1


async def test_what_was_not_announced_is_announced_and_not_done_again(
    world: World, redis: Redis
) -> None:
    failed = await world.post(body={"unannounced": True})
    assert failed.status_code == 503 and await world.effects() == 1
    async with redis.pubsub() as heard:
        await heard.subscribe(CHANNEL)
        again = await world.post(body={"unannounced": True})
        assert again.status_code == 409 and again.json()["code"] == "idempotency_answer_lost"
        messages = [await heard.get_message(timeout=60) for _ in range(2)]
    assert [each["data"] for each in messages if each is not None] == [1, b"*"]
    assert await world.effects() == 1


async def test_concurrent_duplicates_have_one_effect(world: World) -> None:
    answers = await asyncio.gather(*(world.post(body={"wait_s": 0.2}) for _ in range(20)))
    made = [each for each in answers if each.status_code == 201]
    waiting = [each for each in answers if each.status_code == 409]
    assert len(made) + len(waiting) == 20 and made
    assert {each.json()["code"] for each in waiting} <= {"idempotency_in_flight"}
    assert all(each.headers["retry-after"] == "1" for each in waiting)
    assert await world.effects() == 1


async def test_a_dead_workers_claim_is_taken_over_in_time(world: World) -> None:
    claim = a_claim(world, "req_dead")
    assert await world.keys.claim(claim) is None  # and its worker dies
    assert (await world.post()).status_code == 409
    await world.age(idempotency_keys.CLAIM_TIMEOUT_S - 5)
    assert (await world.post()).status_code == 409
    await world.age(10)
    assert (await world.post()).status_code == 201
    assert await world.effects() == 1
    await world.keys.settle(claim, Answer(status=200, headers=[], body=b"late"))
    assert SECRET in (await world.post()).text, "whoever was taken over keeps nothing"


async def test_what_a_dead_worker_has_done_is_not_done_again(world: World) -> None:
    made = await world.post()
    lost = {"status": None, "response": None, "secret_id": None}
    await world.age(idempotency_keys.CLAIM_TIMEOUT_S + 1, **lost)
    for _ in range(2):
        again = await world.post()
        assert again.status_code == 409 and again.json()["code"] == "idempotency_answer_lost"
        assert again.headers["x-should-retry"] == "false"
    assert made.status_code == 201 and await world.effects() == 1


async def freeze(world: World, place: str) -> tuple[asyncio.Task[httpx.Response], asyncio.Event]:
    """A request that stands still there until its claim can be taken over."""
    reached, thawed = freezing[place] = asyncio.Event(), asyncio.Event()
    first = asyncio.create_task(world.post())
    await asyncio.wait_for(reached.wait(), 30)
    await world.age(idempotency_keys.CLAIM_TIMEOUT_S + 1)
    return first, thawed


async def test_a_frozen_worker_that_was_taken_over_changes_nothing(world: World) -> None:
    first, thawed = await freeze(world, "before")
    second = await world.post()
    assert second.status_code == 201 and await world.effects() == 1
    thawed.set()
    late = await first
    assert late.status_code == 409 and late.json()["code"] == "idempotency_in_flight"
    assert late.headers["retry-after"] == "1" and await world.effects() == 1
    again = await world.post()
    assert again.content == second.content, "the answer of who carried it out"


async def test_a_frozen_worker_that_holds_its_change_is_waited_for(world: World) -> None:
    first, thawed = await freeze(world, "inside")
    second = asyncio.create_task(world.post())
    done, _ = await asyncio.wait([second], timeout=0.3)
    assert not done, "nobody knows yet whether it will commit"
    thawed.set()
    assert (await first).status_code == 201
    assert (await second).json()["code"] == "idempotency_answer_lost"
    assert (await world.post()).json() == (await first).json(), "it was kept after all"
    assert await world.effects() == 1


async def test_keys_expire_and_are_swept(world: World) -> None:
    await world.post()
    await world.age(idempotency_keys.LIFETIME_S - 60)
    assert await world.keys.sweep() == 0
    assert (await world.post()).headers["idempotent-replayed"] == "true"
    await world.age(120)
    fresh = await world.post()
    assert fresh.status_code == 201 and "idempotent-replayed" not in fresh.headers
    await world.age(idempotency_keys.LIFETIME_S + 1)
    assert await world.keys.sweep() == 1 and await world.rows() == []


async def test_a_kept_answer_is_sealed(world: World) -> None:
    await world.post()
    (row,) = await world.rows()
    assert SECRET.encode() not in row.response and b"secret" not in row.response
    assert hashlib.sha256(b"k").digest() == row.key_digest
    async with world.db.begin() as conn:
        flipped = row.response[:-1] + bytes([row.response[-1] ^ 1])
        await conn.execute(sa.update(table).values(response=flipped))
    assert (await world.post()).json()["code"] == "idempotency_answer_lost"


async def test_an_answer_outlives_the_rotation_of_the_secret_and_no_longer(world: World) -> None:
    claim = a_claim(world, "req_1")
    answer = Answer(status=201, headers=[(b"etag", b'"1"')], body=b"{}")
    assert await world.keys.claim(claim) is None
    await world.keys.settle(claim, answer)

    def under(*ids: str) -> IdempotencyKeys:
        pools = {"db": world.keys._db, "system_db": world.keys._system_db}
        return IdempotencyKeys(**pools, secret=secret_of(*ids))

    assert await under("s2", "s1").claim(claim) == answer
    with pytest.raises(AnswerLost):
        await under("s2").claim(claim)


async def test_a_request_that_takes_too_long_is_given_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "HANDLER_TIMEOUT_S", 0.1)
    slow = await world.post(body={"wait_s": 5})
    assert slow.status_code == 503 and slow.json()["code"] == "service_unavailable"
    assert await world.effects() == 0 and await world.rows() == []


async def test_a_lost_postgres_costs_the_replay_and_not_the_answer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(claim: Claim, answer: Answer) -> None:
        raise OSError

    monkeypatch.setattr(world.keys, "settle", lost)
    assert (await world.post()).status_code == 201
    assert (await world.post()).status_code == 409


async def test_sweeping_goes_on_after_a_failure(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency_keys, "SWEEP_INTERVAL_S", 0.001)
    calls = itertools.count(1)
    swept = asyncio.Event()

    async def sweep() -> int:
        if next(calls) == 1:
            raise OSError
        swept.set()
        return 0

    monkeypatch.setattr(world.keys, "sweep", sweep)
    task = asyncio.create_task(world.keys.periodic_sweep().run())
    await asyncio.wait_for(swept.wait(), 30)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def a_claim(world: World, request_id: str) -> Claim:
    """Return what `World.post()` claims."""
    line = b"POST\n/v1/admin/things\n\n" + hashlib.sha256(b"{}").digest()
    return Claim(
        org_id=world.org_id,
        principal="key_1",
        key_digest=hashlib.sha256(b"k").digest(),
        request_digest=hashlib.sha256(line).digest(),
        request_id=request_id,
    )


runs = itertools.count()
SCRIPT = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([{}, {"taken": True}, {"fails": True}])),
    min_size=1,
    max_size=12,
)


@settings(
    max_examples=examples(10),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(script=SCRIPT)
async def test_each_key_has_at_most_one_effect(
    world: World, script: list[tuple[int, dict[str, Any]]]
) -> None:
    run, before = next(runs), await world.effects()
    await asyncio.gather(*(world.post(f"r{run}-{key}", body) for key, body in script))
    effective = {key for key, body in script if "taken" not in body}
    # A key whose only winners were refused ones may have been let go and taken again.
    assert await world.effects() - before <= len(effective)
    final = [await world.post(f"r{run}-{key}", {}) for key in effective]
    assert {each.status_code for each in final} <= {201, 422}
    assert await world.effects() - before == len(effective)
