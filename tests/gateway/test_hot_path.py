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

from gateway.database import PEPPER_PURPOSE
from gateway.secret import Secret
from gateway.tenancy.keys import create_key
from tests.gateway.auth.browsing import live_app, new_browser
from tests.gateway.auth.conftest import ACTOR, make_tenant
from tests.gateway.fleet.scripted_upstream import Upstream, completion, good_stream

IN_REQUEST: ContextVar[bool] = ContextVar("in_request", default=False)
"""Tasks that a request starts inherit it; what ships usage or sweeps runs by itself."""
CHAT = "/v1/chat/completions"


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
    tmp_path: Path, postgres_url: str, redis_url: str, db: AsyncEngine
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
    config.write_text(
        f'[[model]]\nname = "big"\nupstream = "http://127.0.0.1:{port}/v1"\n'
        "[plan.bound]\ntokens_per_minute = 1_000_000\nrequests_per_minute = 10_000\n"
    )
    async with live_app(tmp_path, postgres_url, redis_url, None, config=str(config)) as made:
        yield made
    server.close()
    for writer in list(upstream.writers):
        writer.transport.abort()
    await server.wait_closed()


@pytest.fixture
async def key(app: Litestar, db: AsyncEngine, tmp_path: Path) -> str:
    acme = await make_tenant(db, "acme")
    secret = Secret.load(tmp_path / "secret.json").current
    async with db.begin() as conn:
        made = await create_key(
            conn,
            org_id=acme.org_id,
            project_id=acme.project_id,
            name="hot",
            scopes=["inference"],
            pepper=secret.derive(PEPPER_PURPOSE),
            pepper_id=secret.id,
            actor=ACTOR,
        )
    return made.secret


async def ask(http: httpx.AsyncClient, key: str, *, stream: bool) -> str:
    IN_REQUEST.set(True)
    body = {"model": "big", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    answer = await http.post(CHAT, json=body, headers={"authorization": f"Bearer {key}"})
    IN_REQUEST.set(False)
    assert answer.status_code == 200, answer.text
    return answer.text


async def test_a_completion_with_a_known_key_asks_postgres_nothing(app: Litestar, key: str) -> None:
    pools = app.state.services.db, app.state.services.system_db
    async with new_browser(app) as http:
        with statements(*pools) as cold:
            assert "Hello there" in await ask(http, key, stream=False)
        assert cold, "whoever comes first is looked up, and this test sees it"
        with statements(*pools) as warm:
            for stream in (False, True, False, True):
                assert "Hel" in await ask(http, key, stream=stream)
        assert warm == []
