"""`Idempotency-Key` on generation: whatever is lost on the way, one answer and one bill. The whole
application, an upstream on a real socket, and a fresh organization for each test; what a dead
gateway leaves is left here, too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import product
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest
import sqlalchemy as sa
from litestar import Litestar
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.corrections.superseded_requests import take_back
from billing.ledger.accounts import account_of
from billing.reconciliation.checks import check_ledger
from billing.tables import transfers, usage_events
from gateway.db import create_engine
from gateway.fleet.errors import DeadlinePassed, ReplicaLost
from gateway.ids import uuid7
from gateway.routes.shared import idempotency
from gateway.secret import Secret, SecretKey
from gateway.tenancy import idempotency_keys
from gateway.tenancy.idempotency_keys import Claim, IdempotencyKeys
from gateway.tenancy.keys.keys import PEPPER_PURPOSE, create_key
from gateway.tenancy.tables import idempotency_keys as table
from gateway.tenancy.tables import projects
from tests.databases import Databases
from tests.gateway.auth.browsing import live_app, new_browser
from tests.gateway.auth.conftest import ACTOR, Tenant, make_tenant
from tests.gateway.conftest import be_patient
from tests.gateway.fleet.upstream.scripted_upstream import (
    Exchange,
    Upstream,
    chunk,
    completion,
    good_stream,
)
from tests.shared_application import in_one_task, on_one_loop, stores_of_its_own

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASKED: dict[str, Any] = {CHAT: {}, RESPONSES: {}, MESSAGES: {"max_tokens": 9}}
OTHERS = (RESPONSES, MESSAGES)
BOOK = """
[[price]]
model = "big"
valid_from = "2020-01-01"
uncached_input = "1"
cache_read = "1"
cache_write = "1"
output = "2"
"""


class Application(NamedTuple):
    """It serves all tests here, its upstream too, of which each begins with nothing asked."""

    app: Litestar
    db: AsyncEngine
    upstream: Upstream
    secret: SecretKey


class World:
    def __init__(self, shared: Application, owner: Tenant, key: str) -> None:
        self.app, self.db, self.owner, self.key = shared.app, shared.db, owner, key
        self.upstream = shared.upstream
        self.upstream.script = self.answers
        self.upstream.exchanges.clear()
        self.gate = asyncio.Event()
        self.gate.set()

    async def answers(self, exchange: Exchange) -> None:
        await self.gate.wait()
        if exchange.body.get("stream"):
            await good_stream(exchange)
        else:
            await exchange.answer(completion())

    async def ask(
        self, key: str | None = "k", *, says: str = "hi", path: str = CHAT, **body: Any
    ) -> httpx.Response:
        asked = {"model": "big", **ASKED[path], **body}
        asked["input" if path == RESPONSES else "messages"] = [{"role": "user", "content": says}]
        headers = {"authorization": f"Bearer {self.key}"}
        if key is not None:
            headers["idempotency-key"] = key
        async with new_browser(self.app) as http:
            return await http.post(path, json=asked, headers=headers)

    @property
    def num_asked(self) -> int:
        return len(self.upstream.exchanges)

    async def charged(self) -> int:
        """Pico-USD, by what was posted."""
        assert await self.app.state.services.shipper.drain(10.0)
        own, account = transfers.c, account_of(self.owner.org_id)
        signed = sa.case((own.debit == account, own.amount_pico), else_=-own.amount_pico)
        async with self.db.connect() as conn:
            found = sa.select(sa.func.sum(signed)).where(self.has_transfer)
            return int(await conn.scalar(found) or 0)

    @property
    def has_transfer(self) -> sa.ColumnElement[bool]:
        """Selects those of the owner's account."""
        account = account_of(self.owner.org_id)
        return sa.or_(transfers.c.debit == account, transfers.c.credit == account)

    async def events(self) -> list[Any]:
        assert await self.app.state.services.shipper.drain(10.0)
        async with self.db.connect() as conn:
            found = sa.select(usage_events).where(
                usage_events.c.kind == "usage", usage_events.c.org == self.owner.org_id
            )
            return list(await conn.execute(found.order_by(usage_events.c.id)))

    async def claims(self) -> list[Any]:
        async with self.db.connect() as conn:
            found = sa.select(table).where(table.c.org_id == self.owner.org_id)
            return list(await conn.execute(found))

    async def age(self) -> None:
        """No gateway has said for long that it runs."""
        moment = sa.func.now() - sa.func.make_interval(0, 0, 0, 0, 0, 0, 1 + ALIVE_S)
        async with self.db.begin() as conn:
            of_owner = sa.update(table).where(table.c.org_id == self.owner.org_id)
            await conn.execute(of_owner.values(claimed_at=moment))


ALIVE_S = idempotency_keys.ALIVE_S


@on_one_loop(scope="module")
async def application(
    databases: Databases, redis_server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Application]:
    folder, upstream = tmp_path_factory.mktemp("application"), Upstream()
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    (folder / "book.toml").write_text(BOOK)
    config = folder / "upstream.toml"
    config.write_text(
        f'price_books = ["{folder}/book.toml"]\n[[model]]\nname = "big"\n'
        f'upstream = "http://127.0.0.1:{port}/v1"\n'
    )
    with pytest.MonkeyPatch.context() as patch:
        be_patient(patch)
        async with stores_of_its_own(databases, redis_server_url) as (url, redis_url):
            db = create_engine(url)
            started = live_app(folder, url, redis_url, None, config=str(config))
            async with in_one_task(started) as app:
                patch.undo()
                secret = Secret.load(folder / "secret.json").current
                yield Application(app, db, upstream, secret)
            await db.dispose()
    server.close()
    for writer in list(upstream.writers):
        writer.transport.abort()
    await server.wait_closed()


@on_one_loop()
async def world(application: Application, patient: None) -> World:
    owner = await make_tenant(application.db, f"acme-{uuid7().hex}")
    async with application.db.begin() as conn:
        key = await create_key(
            conn,
            org_id=owner.org_id,
            project_id=owner.project_id,
            name="once",
            scopes=["inference"],
            pepper=application.secret.derive(PEPPER_PURPOSE),
            pepper_id=application.secret.id,
            actor=ACTOR,
        )
    return World(application, owner, key.secret)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_gets_the_first_answer_and_no_second_bill(world: World, stream: bool) -> None:
    first = await world.ask(stream=stream)
    again = await world.ask(stream=stream)
    assert first.status_code == again.status_code == 200
    assert (again.content, again.headers["content-type"]) == (
        first.content,
        first.headers["content-type"],
    )
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert again.headers.get_list("x-request-id") != first.headers.get_list("x-request-id")
    assert len(again.headers.get_list("x-request-id")) == 1
    assert world.num_asked == len(await world.events()) == 1
    other = await world.ask("another", stream=stream)
    assert other.status_code == 200 and world.num_asked == 2


async def test_meanwhile_it_is_in_flight_and_another_body_is_another_request(world: World) -> None:
    world.gate.clear()
    first = asyncio.create_task(world.ask())
    async with asyncio.timeout(30):
        while not world.num_asked:
            await asyncio.sleep(0.01)
    busy = await world.ask()
    assert (busy.status_code, busy.json()["error"]["code"]) == (409, "idempotency_in_flight")
    assert "retry-after" in busy.headers
    other = await world.ask(says="something else")
    assert (other.status_code, other.json()["error"]["code"]) == (400, "idempotency_key_reused")
    world.gate.set()
    assert (await first).status_code == 200
    assert (await world.ask(says="something else")).status_code == 400
    assert world.num_asked == len(await world.events()) == 1


async def test_other_surfaces_answer_once_as_well(world: World) -> None:
    """Each with keys of its own: whole and streamed, as it was first, on one bill."""
    for number, (path, stream) in enumerate(product(OTHERS, (False, True)), 1):
        key = f"{path} {stream}".replace(" ", "-")
        first = await world.ask(key, path=path, stream=stream)
        again = await world.ask(key, path=path, stream=stream)
        assert first.status_code == again.status_code == 200, first.text
        assert (again.content, again.headers["content-type"]) == (
            first.content,
            first.headers["content-type"],
        )
        assert ("event-stream" in again.headers["content-type"]) is stream
        assert "idempotent-replayed" not in first.headers
        assert again.headers["idempotent-replayed"] == "true"
        other = await world.ask(key, path=path, says="something else", stream=stream)
        assert other.status_code == 400 and "Idempotency-Key" in other.text
        assert world.num_asked == len(await world.events()) == number


async def test_other_surfaces_say_as_well_that_it_is_in_flight(world: World) -> None:
    for number, (path, stream) in enumerate(product(OTHERS, (False, True)), 1):
        key = f"{path} {stream}".replace(" ", "-")
        world.gate.clear()
        first = asyncio.create_task(world.ask(key, path=path, stream=stream))
        async with asyncio.timeout(30):
            while world.num_asked < number:
                await asyncio.sleep(0.01)
        busy = await world.ask(key, path=path, stream=stream)
        assert busy.status_code == 409 and "retry-after" in busy.headers
        assert ("error" in busy.json()) and (busy.json().get("type") == "error") is (
            path == MESSAGES
        )
        world.gate.set()
        assert (await first).status_code == 200
        assert world.num_asked == len(await world.events()) == number


async def test_what_failed_and_was_billed_nothing_lets_go_of_its_key(world: World) -> None:
    good = world.upstream.script

    async def refuses(exchange: Exchange) -> None:
        await exchange.answer({"error": {"message": "no", "code": None}}, status=400)

    world.upstream.script = refuses
    assert (await world.ask()).status_code == 400
    world.upstream.script = good
    answer = await world.ask()
    assert answer.status_code == 200 and "idempotent-replayed" not in answer.headers
    assert len(await world.events()) == 1


@pytest.mark.parametrize("cut", ["its time is over", "its gateway leaves"])
async def test_what_is_cut_off_and_billed_keeps_its_key(world: World, cut: str) -> None:
    """The reader hears of it before the bill does: a retry must not be a second one."""

    async def begins(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(chunk(""), chunk("Hel"), chunk("lo"))
        await exchange.hang()

    world.upstream.script = begins
    asking = asyncio.create_task(world.ask(stream=True))
    open_calls = world.app.state.services.generation.open_calls
    async with asyncio.timeout(30):
        while not any(each.begun for each in open_calls.values()):
            await asyncio.sleep(0.01)
    [delivery] = open_calls.values()
    if cut == "its time is over":
        delivery.expire(DeadlinePassed("late"))
    else:
        delivery.abandon(ReplicaLost("this gateway is shutting down"))
    first = await asking
    assert '"error"' in first.text and "[DONE]" not in first.text
    world.upstream.script = world.answers
    again = await world.ask(stream=True)
    assert (again.content, again.headers.get("idempotent-replayed")) == (first.content, "true")
    assert world.num_asked == len(await world.events()) == 1


async def test_what_is_cut_off_and_billed_nothing_lets_go_of_its_key(world: World) -> None:
    world.gate.clear()
    asking = asyncio.create_task(world.ask())
    async with asyncio.timeout(30):
        while not world.num_asked:
            await asyncio.sleep(0.01)
    [delivery] = world.app.state.services.generation.open_calls.values()
    delivery.abandon(ReplicaLost("this gateway is shutting down"))
    assert (await asking).status_code >= 500
    world.gate.set()
    again = await world.ask()
    assert again.status_code == 200 and "idempotent-replayed" not in again.headers
    assert len(await world.events()) == 1


async def test_who_understands_nothing_claims_nothing(world: World) -> None:
    assert (await world.ask(n="many")).status_code == 400
    assert (await world.ask("two words")).status_code == 400
    assert await world.claims() == []


async def test_what_is_too_long_to_be_kept_is_billed_once_and_said_to_be_lost(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "MAX_KEPT_BYTES", 100)
    assert "[DONE]" in (await world.ask(stream=True)).text
    for _ in range(2):
        lost = await world.ask(stream=True)
        assert (lost.status_code, lost.json()["error"]["code"]) == (409, "idempotency_answer_lost")
    assert len(await world.events()) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_project_that_keeps_nothing_keeps_no_answer_and_is_billed_once(
    world: World, stream: bool
) -> None:
    async with world.db.begin() as conn:
        of_owner = sa.update(projects).where(projects.c.id == world.owner.project_id)
        await conn.execute(of_owner.values(zero_retention=True))
    first = await world.ask(stream=stream)
    again = await world.ask(stream=stream)
    assert first.status_code == 200 and first.content
    assert (again.status_code, again.json()["error"]["code"]) == (409, "idempotency_answer_lost")
    assert "keeps nothing" in again.json()["error"]["message"]
    assert world.num_asked == len(await world.events()) == 1
    keys: IdempotencyKeys = world.app.state.services.idempotency_keys
    [row] = await world.claims()
    claim = Claim(
        org_id=row.org_id,
        principal=row.principal,
        key_digest=row.key_digest,
        request_digest=row.request_digest,
        request_id=row.request_id,
    )
    held = msgspec.msgpack.decode(keys._cipher.open(row.response, claim.bound, row.secret_id))
    assert (held["headers"], held["body"]) == ([], b"")


async def test_who_leaves_finds_the_answer_when_he_comes_back(world: World) -> None:
    world.gate.clear()
    asked = {"model": "big", "messages": [{"role": "user", "content": "hi"}]}
    body = json.dumps(asked).encode()
    scope: Any = {
        "type": "http",
        "method": "POST",
        "path": CHAT,
        "raw_path": CHAT.encode(),
        "query_string": b"",
        "headers": [
            (b"authorization", f"Bearer {world.key}".encode()),
            (b"idempotency-key", b"k"),
            (b"content-type", b"application/json"),
        ],
        "client": ("192.0.2.7", 1),
        "server": ("127.0.0.1", 80),
        "scheme": "http",
        "http_version": "1.1",
        "extensions": {},
    }
    came = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        return next(came, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        """To nobody."""

    left = asyncio.create_task(world.app(scope, receive, send))
    async with asyncio.timeout(30):
        while not world.num_asked:
            await asyncio.sleep(0.01)
    world.gate.set()
    await left
    async with new_browser(world.app) as http:
        headers = {"authorization": f"Bearer {world.key}", "idempotency-key": "k"}
        headers["content-type"] = "application/json"
        again = await http.post(CHAT, content=body, headers=headers)
    assert again.status_code == 200 and again.headers["idempotent-replayed"] == "true"
    assert world.num_asked == len(await world.events()) == 1


async def test_without_postgres_nobody_is_told_that_it_is_done_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: Any) -> None:
        raise OSError("gone")

    monkeypatch.setattr(world.app.state.services.idempotency_keys, "claim", away)
    assert (await world.ask()).status_code == 503
    assert (await world.ask(None)).status_code == 200
    assert world.num_asked == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_dead_gateway_billed_is_taken_back_once_it_is_retried(
    world: World, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """It died behind the bill and before the answer was kept; its usage may come to the books
    before the retry or after it."""
    keys = world.app.state.services.idempotency_keys

    async def dies(*_: Any) -> None:
        raise OSError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(keys, "keep", dies)
        await world.ask(stream=stream)
    once = await world.charged()
    assert once > 0
    assert (await world.ask(stream=stream)).status_code == 409, "it may still be alive"
    await world.age()
    again = await world.ask(stream=stream)
    assert again.status_code == 200 and "idempotent-replayed" not in again.headers
    replayed = await world.ask(stream=stream)
    assert (replayed.content, world.num_asked) == (again.content, 2)
    first, second = await world.events()
    assert second.request_id == again.headers["x-request-id"]
    await take_back(world.db)  # unless the application was faster
    assert await world.charged() == once, "the second alone"
    async with world.db.connect() as conn:
        reversals = sa.select(transfers.c.corrects).where(
            transfers.c.kind == "reversed", world.has_transfer
        )
        assert list(await conn.scalars(reversals)) == [first.id]
    assert await take_back(world.db) == 0
    assert await check_ledger(world.db) == []


async def test_a_gateway_that_only_slept_bills_nothing_either(world: World) -> None:
    """Its key was taken over meanwhile: what it wakes up to bill is taken back."""
    world.gate.clear()
    asleep = asyncio.create_task(world.ask())
    async with asyncio.timeout(30):
        while not world.num_asked:
            await asyncio.sleep(0.01)
    await world.age()
    retry = asyncio.create_task(world.ask())
    async with asyncio.timeout(30):
        while world.num_asked < 2:
            await asyncio.sleep(0.01)
    world.gate.set()
    await asyncio.gather(asleep, retry)
    replayed = await world.ask()
    assert replayed.content == retry.result().content
    assert len(await world.events()) == 2
    await take_back(world.db)
    by_request = {each.request_id: each for each in await world.events()}
    kept = by_request[retry.result().headers["x-request-id"]]
    async with world.db.connect() as conn:
        amount = sa.select(transfers.c.amount_pico).where(transfers.c.id == kept.id)
        assert await world.charged() == int(await conn.scalar(amount) or 0) > 0
    assert await check_ledger(world.db) == []
