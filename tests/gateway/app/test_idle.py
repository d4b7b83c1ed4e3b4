"""An idle worker asks next to nothing. Counts are compared, not times: `bench.idle` has those."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
import sqlalchemy as sa
from sqlalchemy.engine import Engine

from gateway.app.create import create_app
from gateway.routes.shared.services import Services
from gateway.secret import Secret
from gateway.settings.load import load
from gateway.worker.work_listener import WorkListener

SECONDS = 6
QUIET_S = 2.5
"""A worker has settled that asked Postgres nothing for so long."""
PATIENCE_S = 60.0
MAX_TRANSACTIONS = 2
"""Leaves room for a look at what is due, which comes twice a minute, and for one task more."""
MAX_COMMANDS = 9.0 * SECONDS
"""Bounds heartbeats and numbers of announcements (1.7 a second each), looks for a loss of data (2),
and what comes every few seconds."""
MAX_WAKE_UPS = 12.0 * SECONDS
"""Leaves room for ten a second, and a few of the test's own."""


@contextmanager
def counted_transactions(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Note each statement that begins a transaction in this database, of all pools, and the looks
    of its listener: applications that many tests share live through this test."""
    name = sa.make_url(postgres_url).database
    found: list[str] = []
    look = WorkListener._look

    async def noted_look(self: WorkListener, connection: Any) -> float:
        if self._db.url.database == name:
            found.append("look")
        return await look(self, connection)

    def note(conn: sa.Connection) -> None:
        if conn.engine.url.database == name:
            found.append("begin")

    sa.event.listen(Engine, "begin", note)
    with monkeypatch.context() as patch:
        patch.setattr(WorkListener, "_look", noted_look)
        yield found
    sa.event.remove(Engine, "begin", note)


@contextmanager
def counted_wake_ups(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Note each time that this loop slept."""
    slept: list[float] = []
    selector: Any = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
    select = selector.select

    def noted(timeout: float | None = None) -> Any:
        if timeout is None or timeout > 0:
            slept.append(-1.0 if timeout is None else timeout)
        return select(timeout)

    with monkeypatch.context() as patch:
        patch.setattr(selector, "select", noted)
        yield slept


async def num_commands(store: redis.asyncio.Redis) -> int:
    """Return the server's commands, less those of clients on another database: an application that
    many tests share is on one, and lives through this test."""
    found: int = (await store.info("stats"))["total_commands_processed"]
    others = [each for each in await store.client_list() if each["db"] != "0"]
    return found - sum(int(each["tot-cmds"]) for each in others)


@asynccontextmanager
async def idle_worker(home: Path, postgres_url: str, redis_url: str) -> AsyncIterator[Services]:
    (home / "tollgate.toml").write_text(
        '[[model]]\nname = "b"\nupstream = "http://127.0.0.1:1/v1"\n'
    )
    Secret.load_or_create(home / "secret.json")
    flags: dict[str, Any] = {
        "home": home,
        "config": home / "tollgate.toml",
        "secret_key_file": home / "secret.json",
        "database_url": postgres_url,
        "redis_url": redis_url,
    }
    app = create_app(load(flags, {}))
    async with app.lifespan():
        yield app.state.services


async def test_an_idle_worker_asks_next_to_nothing(
    tmp_path: Path,
    postgres_url: str,
    redis_url: str,
    redis: redis.asyncio.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with counted_transactions(postgres_url, monkeypatch) as transactions:
        async with idle_worker(tmp_path, postgres_url, redis_url) as services:
            async with asyncio.timeout(PATIENCE_S):
                before = -1
                while not services.listener.is_hearing or len(transactions) != before:
                    before = len(transactions)
                    await asyncio.sleep(QUIET_S)
            transactions.clear()
            commands = await num_commands(redis)
            with counted_wake_ups(monkeypatch) as wake_ups:
                await asyncio.sleep(SECONDS)
            assert len(transactions) <= MAX_TRANSACTIONS, transactions
            assert await num_commands(redis) - commands <= MAX_COMMANDS
            assert len(wake_ups) <= MAX_WAKE_UPS
