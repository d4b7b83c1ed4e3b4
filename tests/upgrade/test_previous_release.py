"""The last release, out of this repository, serves on today's schema, beside today's gateways."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.reconciliation.checks import check_ledger
from migrations.releases import last_release
from tests.scratch import make_scratch
from tests.test_tidy import ROOT
from tests.upgrade.release_tree import TreeProcesses, check_out, processes

WAIT_S = 60.0
REFILL_S = 30.0
"""A bucket of two requests a minute holds one, and has room for one more after this."""
TRIES = 5


@pytest.fixture(scope="module")
def release_tree() -> Iterator[Path]:
    """Hold the code of the last release."""
    folder = make_scratch()
    yield check_out(last_release(), folder)
    shutil.rmtree(folder)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Pytest's own folders are too long for a socket."""
    made = make_scratch()
    yield made
    shutil.rmtree(made)


class Client:
    """Asks one gateway, and counts what it answered."""

    def __init__(self, gateway: TreeProcesses, admin_key: str) -> None:
        self._http = httpx.AsyncClient(base_url=gateway.base_url, timeout=60)
        self._admin = {"authorization": f"Bearer {admin_key}"}
        self.answered = 0

    async def chat(self, key: str, *, stream: bool = False) -> int:
        """Return the status; an answer has to be whole."""
        body: dict[str, Any] = {
            "model": "penny",
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 4,
            "stream": stream,
        }
        headers = {"authorization": f"Bearer {key}"}
        answer = await self._http.post("/v1/chat/completions", json=body, headers=headers)
        if answer.status_code == 200:
            self.answered += 1
            if stream:
                assert answer.text.rstrip().endswith("data: [DONE]"), answer.text
            else:
                assert answer.json()["usage"]["completion_tokens"] > 0
        return answer.status_code

    async def create_key(self, **fields: Any) -> tuple[str, str]:
        """Return the id and the secret of a new key in the first project."""
        projects = await self._http.get("/v1/organization/projects", headers=self._admin)
        body = {"name": "made", "project_id": projects.json()["data"][0]["id"], **fields}
        made = await self._http.post("/v1/admin/keys", json=body, headers=self._admin)
        assert made.status_code == 201, made.text
        return made.json()["id"], made.json()["value"]

    async def revoke_key(self, id_: str) -> None:
        done = await self._http.post(f"/v1/admin/keys/{id_}/revoke", headers=self._admin)
        assert done.status_code == 200, done.text

    async def close(self) -> None:
        await self._http.aclose()


async def until_booked(db: AsyncEngine, answers: int) -> None:
    query = sa.text("SELECT count(*) FROM usage_events WHERE kind = 'usage'")
    async with asyncio.timeout(WAIT_S):
        while True:
            async with db.connect() as connection:
                found = await connection.scalar(query)
            if found == answers:
                return
            assert found is not None and found < answers
            await asyncio.sleep(0.05)


async def until_refused(client: Client, key: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while await client.chat(key) != 401:
            await asyncio.sleep(0.05)


async def check_shared_limit(one: Client, other: Client) -> None:
    """Take from a bucket at one, and find it empty at the other. Where a busy machine lets the
    bucket refill meanwhile, another key tries it."""
    for _ in range(TRIES):
        _, key = await one.create_key(plan="narrow")
        began = time.monotonic()
        assert await one.chat(key) == 200
        second = await other.chat(key)
        if second == 429:
            return
        assert time.monotonic() - began > REFILL_S / 2, "each has a bucket of its own"
    raise AssertionError(f"not tried in {TRIES} times")


@pytest.mark.slow
async def test_the_last_release_serves_beside_this_one(
    release_tree: Path, folder: Path, postgres_url: str, redis_url: str, db: AsyncEngine
) -> None:
    """It answers, makes keys, counts and is counted; what it leaves when it is killed is booked by
    today's."""
    home = folder / "home"
    stores = {
        "TOLLGATE_HOME": str(home),
        "TOLLGATE_DATABASE_URL": postgres_url,
        "TOLLGATE_REDIS_URL": redis_url,
    }
    with (
        processes(ROOT, folder / "new", stores) as new,
        processes(release_tree, folder / "old", stores) as old,
    ):
        migrated = new.run("migrate")
        assert migrated.returncode == 0, migrated.stderr
        known = json.loads((home / "credentials.json").read_text())
        assert old.run("migrate").returncode == 0, "it finds a newer schema that serves it"
        old.start()
        before = Client(old, known["admin_key"])
        assert await before.chat(known["api_key"]) == 200
        assert await before.chat(known["api_key"], stream=True) == 200
        await until_booked(db, before.answered)

        new.start()
        after = Client(new, known["admin_key"])
        id_of_old, key_of_old = await before.create_key()
        id_of_new, key_of_new = await after.create_key()
        assert await after.chat(key_of_old, stream=True) == 200
        assert await before.chat(key_of_new, stream=True) == 200
        await check_shared_limit(before, after)
        await check_shared_limit(after, before)
        await after.revoke_key(id_of_old)
        await before.revoke_key(id_of_new)
        await until_refused(before, key_of_old)
        await until_refused(after, key_of_new)

        assert await before.chat(known["api_key"]) == 200
        old.kill()
        await until_booked(db, before.answered + after.answered)
        assert await check_ledger(db) == []
        await before.close()
        await after.close()
        assert new.stop() == 0
