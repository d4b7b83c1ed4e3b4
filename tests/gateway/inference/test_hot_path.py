"""No statement reaches Postgres between a request with a known key and the end of its answer: the
whole application, both of its pools, an upstream on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from litestar import Litestar
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.ids import uuid7
from gateway.principal import Plan
from gateway.secret import Secret
from gateway.tenancy.keys.keys import PEPPER_PURPOSE, create_key
from gateway.tenancy.keys.restrictions import Restrictions
from gateway.tenancy.member_tables import service_accounts
from gateway.tenancy.money.plans import sync_plans
from gateway.tenancy.tables import orgs, projects
from tests.gateway.auth.browsing import live_app, new_browser
from tests.gateway.auth.conftest import ACTOR, Tenant, make_tenant
from tests.gateway.fleet.upstream.scripted_upstream import Upstream, completion, good_stream
from tests.pace import within

IN_REQUEST: ContextVar[bool] = ContextVar("in_request", default=False)
"""Tasks that a request starts inherit it; what ships usage or sweeps runs by itself."""
CHAT = "/v1/chat/completions"
PLANS = (
    Plan(name="bound", tokens_per_minute=1_000_000, requests_per_minute=10_000),
    Plan(name="tight", tokens_per_minute=60_000),
)


@contextmanager
def statements(*pools: AsyncEngine) -> Iterator[list[str]]:
    """Those of requests alone."""
    seen: list[str] = []

    def note(_conn: object, _cursor: object, statement: str, *_rest: object) -> None:
        if IN_REQUEST.get():
            seen.append(statement)

    for pool in pools:
        sa.event.listen(pool.sync_engine, "before_cursor_execute", note)
    yield seen
    for pool in pools:
        sa.event.remove(pool.sync_engine, "before_cursor_execute", note)


@pytest.fixture
async def app(
    tmp_path: Path, postgres_url: str, redis_url: str, db: AsyncEngine, patient: None
) -> AsyncIterator[Litestar]:
    upstream = Upstream()

    async def answers(exchange: Any) -> None:
        if exchange.body.get("stream"):
            await good_stream(exchange)
        else:
            await exchange.answer(completion())

    upstream.script = answers
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    config = tmp_path / "upstream.toml"
    config.write_text(f'[[model]]\nname = "big"\nupstream = "http://127.0.0.1:{port}/v1"\n')
    async with live_app(tmp_path, postgres_url, redis_url, None, config=str(config)) as made:
        yield made
    server.close()
    for writer in list(upstream.writers):
        writer.transport.abort()
    await server.wait_closed()


@pytest.fixture
async def acme(app: Litestar, db: AsyncEngine) -> Tenant:
    made = await make_tenant(db, "acme")
    async with db.begin() as conn:
        await sync_plans(conn, PLANS)
        await conn.execute(sa.update(orgs).values(plan="bound"))
        await conn.execute(sa.update(projects).values(plan="bound"))
    return made


async def make_key(db: AsyncEngine, owner: Tenant, home: Path, **options: Any) -> str:
    secret = Secret.load(home / "secret.json").current
    async with db.begin() as conn:
        made = await create_key(
            conn,
            org_id=owner.org_id,
            project_id=owner.project_id,
            pepper=secret.derive(PEPPER_PURPOSE),
            pepper_id=secret.id,
            actor=ACTOR,
            **options,
        )
    return made.secret


@pytest.fixture
async def key(acme: Tenant, db: AsyncEngine, tmp_path: Path) -> str:
    """With each kind of limit that a key can have."""
    own = Restrictions(model_limits={"big": {"tokens_per_minute": 30_000}})
    options = {"name": "hot", "scopes": ["inference"], "plan": "bound", "restrictions": own}
    return await make_key(db, acme, tmp_path, **options)


class Robot:
    """A client that acts alone, and who administers it."""

    def __init__(self, http: httpx.AsyncClient, admin: str, account_id: str) -> None:
        self.http, self.admin, self.account_id = (
            http,
            {"authorization": f"Bearer {admin}"},
            account_id,
        )
        self.path = "/v1/admin/oauth/clients"

    async def says(self, **changes: Any) -> Any:
        """All of the client again."""
        written = {
            "client_name": "robot",
            "grant_types": ["client_credentials"],
            "scopes": ["inference"],
            "service_account_id": self.account_id,
            **changes,
        }
        answer = await self.http.post(self.path, json=written, headers=self.admin)
        assert answer.is_success, answer.text
        return answer.json()

    async def token(self, made: Any) -> str:
        self.path = f"/v1/admin/oauth/clients/{made['id']}"
        answer = await self.http.post(
            "/oauth/token",
            data={"grant_type": "client_credentials"},
            auth=(made["id"], made["client_secret"]),
        )
        assert answer.status_code == 200, answer.text
        return str(answer.json()["access_token"])


@pytest.fixture
async def robot(
    app: Litestar, acme: Tenant, db: AsyncEngine, tmp_path: Path
) -> AsyncIterator[Robot]:
    account_id = f"svc_acct_{uuid7().hex}"
    account = {"id": account_id, "org_id": acme.org_id, "project_id": acme.project_id}
    async with db.begin() as conn:
        added = sa.insert(service_accounts).values(**account, name="robot", role="developer")
        await conn.execute(added.values(project_role="member"))
    admin = await make_key(db, acme, tmp_path, name="admin", scopes=["admin:*"])
    async with new_browser(app) as http:
        yield Robot(http, admin, account_id)


async def ask(http: httpx.AsyncClient, key: str, *, stream: bool) -> httpx.Response:
    IN_REQUEST.set(True)
    body = {"model": "big", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    answer = await http.post(CHAT, json=body, headers={"authorization": f"Bearer {key}"})
    IN_REQUEST.set(False)
    assert answer.status_code == 200, answer.text
    assert "Hel" in answer.text
    return answer


def limit_of(answer: httpx.Response) -> str:
    return str(answer.headers["x-ratelimit-limit-tokens"])


async def test_a_completion_with_a_known_key_asks_postgres_nothing(app: Litestar, key: str) -> None:
    async with new_browser(app) as http:
        await asks_only_once(app, http, key, limit="30000")


async def test_a_completion_with_an_access_token_asks_postgres_nothing(
    app: Litestar, robot: Robot
) -> None:
    """And its client's plan binds it, as it is now."""
    token = await robot.token(await robot.says(plan="tight"))
    await asks_only_once(app, robot.http, token, limit="60000")
    changed = await robot.says(plan=None)
    assert changed["plan"] is None
    async with within(1.0):
        while limit_of(await ask(robot.http, token, stream=False)) != "1000000":
            await asyncio.sleep(0.01)


async def asks_only_once(
    app: Litestar, http: httpx.AsyncClient, credential: str, *, limit: str
) -> None:
    pools = app.state.services.db, app.state.services.system_db
    with statements(*pools) as cold:
        await ask(http, credential, stream=False)
    assert cold, "whoever comes first is looked up, and this test sees it"
    with statements(*pools) as warm:
        for stream in (False, True, False, True):
            assert limit_of(await ask(http, credential, stream=stream)) == limit
    assert warm == []
