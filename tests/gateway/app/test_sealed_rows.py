"""Nothing that tenants wrote or were answered stands readable in Postgres: a canary goes through
files, batches of both shapes, responses and conversations, and every row of every table is read
while lines wait, when some have ended, and at the end."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from anthropic import Anthropic
from openai import OpenAI
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.app import sealed_rows
from gateway.app.sealed_rows import ALL, ONCE_UNSEALED, reseal, seal_unsealed
from gateway.columns import EMPTY
from gateway.db import create_engine
from gateway.secret import Cipher, Secret
from tests.gateway.a_secret import a_secret
from tests.gateway.batches.conftest import client, worker
from tests.gateway.batches.test_batches import CHAT, create, lines_of, until_ended
from tests.gateway.batches.test_message_batches import request
from tests.gateway.batches.test_message_batches import until_ended as until_answered
from tests.gateway.fleet.upstream.scripted_upstream import Exchange, chunk, completion, usage_chunk
from tests.gateway.routes.openapi.running import Running
from tests.journeys.upstreams import good

__all__ = ["client", "worker"]

CANARY = "canary-in-the-coal-mine"
TABLES = sa.text("""
    SELECT quote_ident(schemaname) || '.' || quote_ident(tablename) FROM pg_tables
    WHERE schemaname NOT IN ('pg_catalog', 'information_schema') ORDER BY 1
""")


def forms(secret: str) -> list[str]:
    """As text, as bytea is written, and as base64 wherever it begins in a text."""
    raw = secret.encode()
    found = [secret, raw.hex()]
    for offset in range(3):
        encoded = base64.b64encode(bytes(offset) + raw).decode()
        found.append(encoded[4 if offset else 0 : -4])
    return found


async def readable_in(url: str) -> tuple[list[str], int]:
    """Return the tables in which the canary can be read, and the number of rows of all."""
    engine = create_engine(url, pool_size=1)
    told, rows_seen = list[str](), 0
    async with engine.connect() as conn:
        for table in (await conn.scalars(TABLES)).all():
            rows = (await conn.scalars(sa.text(f"SELECT t::text FROM {table} t"))).all()
            rows_seen += len(rows)
            dumped = "\n".join(rows)
            told += [table for form in forms(CANARY) if form in dumped]
    await engine.dispose()
    return told, rows_seen


def check(worker: Running) -> None:
    url = worker.services.system_db.url.render_as_string(hide_password=False)
    told, rows_seen = asyncio.run(readable_in(url))
    assert told == [] and rows_seen > 30


class Gate:
    """Holds the answers of an upstream until they are let through one by one."""

    def __init__(self, worker: Running) -> None:
        self._worker = worker
        self._places = asyncio.Semaphore(0)
        self.num_asked = 0
        worker.far.script = self._answer

    async def _answer(self, exchange: Exchange) -> None:
        self.num_asked += 1
        await self._places.acquire()
        if exchange.body.get("stream"):
            await exchange.begin_stream()
            await exchange.send(chunk(CANARY), chunk(finish="stop"), usage_chunk(), "[DONE]")
            return await exchange.end_stream()
        message = {"role": "assistant", "content": CANARY}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        await exchange.answer(completion(choices=[choice]))

    def let_through(self, number: int) -> None:
        async def release() -> None:
            for _ in range(number):
                self._places.release()

        self._worker.run(release())


@pytest.fixture
def gate(worker: Running) -> Iterator[Gate]:
    yield Gate(worker)
    worker.far.script = good


def asked(custom_id: str) -> str:
    messages = [{"role": "user", "content": f"say {CANARY}"}]
    body = {"model": "far", "messages": messages, "max_tokens": 4}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body})


def test_a_canary_is_nowhere(worker: Running, client: OpenAI, gate: Gate) -> None:
    upload = (f"{CANARY}.txt", f"about {CANARY}".encode())
    file = client.files.create(file=upload, purpose="user_data")
    assert client.files.retrieve(file.id).filename == f"{CANARY}.txt"
    assert client.files.content(file.id).text == f"about {CANARY}"
    listed = {it.id: it.filename for it in client.files.list(purpose="user_data")}
    assert listed[file.id] == f"{CANARY}.txt"
    batch = create(client, asked(f"{CANARY}-1"), asked(f"{CANARY}-2"), metadata={"of": CANARY})
    refused = create(client, asked("x").replace('"POST"', f'"{CANARY}"'), f'{{"{CANARY}": 1}}')
    assert until_ended(client, refused).status == "failed"
    wait(worker, lambda: gate.num_asked == 2)
    check(worker)
    gate.let_through(1)
    wait(worker, lambda: client.batches.retrieve(batch.id).request_counts.completed == 1)  # type: ignore[union-attr]
    check(worker)
    gate.let_through(100)
    done = until_ended(client, batch)
    assert done.metadata == {"of": CANARY}
    answers = lines_of(client, done.output_file_id)
    assert set(answers) == {f"{CANARY}-1", f"{CANARY}-2"}
    assert CANARY in json.dumps(answers[f"{CANARY}-1"]["response"]["body"])
    conversation = client.conversations.create(
        metadata={"of": CANARY}, items=[{"role": "user", "content": CANARY, "type": "message"}]
    )
    client.responses.create(
        model="far", input=CANARY, conversation=conversation.id, instructions=CANARY
    )
    streamed: Any = client.responses.create(
        model="far", input=CANARY, metadata={"of": CANARY}, background=True, stream=True
    )
    assert CANARY in "".join(event.to_json() for event in streamed)
    client.chat.completions.create(
        model="far",
        messages=[{"role": "user", "content": CANARY}],
        extra_headers={"Idempotency-Key": "once"},
    )
    with Anthropic(base_url=worker.url, api_key=worker.everything, max_retries=0) as ours:
        made = ours.messages.batches.create(requests=[request(CANARY, model="far", system=CANARY)])
        until_answered(ours, made)
        assert [it.custom_id for it in ours.messages.batches.results(made.id)] == [CANARY]
    check(worker)


def wait(worker: Running, is_so: Any) -> None:
    async def until() -> None:
        async with asyncio.timeout(60):
            while not await asyncio.to_thread(is_so):
                await asyncio.sleep(0.02)

    worker.run(until())


async def stored_unsealed(db: AsyncEngine, secret: Secret) -> None:
    """Bring rows into the form that they had before their columns were sealed."""
    for found in ONCE_UNSEALED:
        key = [column.name for column in found.table.primary_key.columns]
        async with db.begin() as conn:
            for row in (await conn.execute(sa.select(found.table))).mappings().all():
                plain = found.open(Cipher(secret, found.purpose), row)
                here = [found.table.c[name] == row[name] for name in key]
                values = {**plain, found.secret: None}
                await conn.execute(sa.update(found.table).where(*here).values(values))


async def secrets_of(db: AsyncEngine) -> set[str | None]:
    """The secrets of all rows that hold something."""
    names = set[str | None]()
    async with db.connect() as conn:
        for found in ALL:
            asked = sa.select(*(found.table.c[it] for it in (*found.columns, found.secret)))
            for row in (await conn.execute(asked)).mappings():
                if any(row[name] not in EMPTY for name in found.columns):
                    names.add(row[found.secret])
    return names


def test_rows_of_before_are_sealed_and_a_new_secret_seals_all_anew(
    worker: Running, client: OpenAI, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    db, secret = worker.services.system_db, Secret.load(worker.secret_key_file)
    file = client.files.create(file=(f"{CANARY}.txt", CANARY.encode() * 9), purpose="user_data")
    batch = create(client, asked(f"{CANARY}-1"), asked(f"{CANARY}-2"), metadata={"of": CANARY})
    refused = create(client, asked("x").replace('"POST"', f'"{CANARY}"'))
    errors = until_ended(client, refused).errors
    conversation = client.conversations.create(metadata={"of": CANARY})
    kept = client.responses.create(model="near", input=CANARY, max_output_tokens=4)
    wait(worker, lambda: gate.num_asked == 2)
    gate.let_through(1)
    wait(worker, lambda: client.batches.retrieve(batch.id).request_counts.completed == 1)  # type: ignore[union-attr]

    def is_whole() -> None:
        assert client.files.retrieve(file.id).filename == f"{CANARY}.txt"
        assert client.files.content(file.id).text == CANARY * 9
        assert client.batches.retrieve(batch.id).metadata == {"of": CANARY}
        assert client.batches.retrieve(refused.id).errors == errors
        assert client.conversations.retrieve(conversation.id).metadata == {"of": CANARY}
        assert client.responses.retrieve(kept.id).id == kept.id

    worker.run(stored_unsealed(db, secret))
    url = db.url.render_as_string(hide_password=False)
    told, _ = asyncio.run(readable_in(url))
    assert {"public.files", "public.file_chunks", "public.batches"} <= set(told)
    assert "public.batch_lines" in told, "what is looked for is found where it stands"
    is_whole()
    assert worker.run(seal_unsealed(db, secret)) > 0
    assert worker.run(seal_unsealed(db, secret)) == 0
    check(worker)
    is_whole()

    newer = Secret(version=1, keys=(*a_secret("newer").keys, *secret.keys))
    with monkeypatch.context() as killed:
        killed.setattr(sealed_rows, "ALL", ALL[:2])
        assert worker.run(reseal(db, newer)).num_sealed > 0
    assert worker.run(secrets_of(db)) == {"newer", secret.current.id}
    done = worker.run(reseal(db, newer))
    assert done.num_sealed > 0 and not done.unreadable

    def is_all_sealed() -> bool:
        worker.run(reseal(db, newer))  # a row that its runner holds is left for the next walk
        return worker.run(secrets_of(db)) == {"newer"}

    wait(worker, is_all_sealed)
    assert worker.run(reseal(db, newer)).num_sealed == 0
    lost = worker.run(reseal(db, secret))
    assert f"files {file.id}" in lost.unreadable, "its secret is not in this file"
    back = Secret(version=1, keys=(*secret.keys, *newer.keys[:1]))
    assert not worker.run(reseal(db, back)).unreadable
    is_whole()
    gate.let_through(100)
    assert set(lines_of(client, until_ended(client, batch).output_file_id)) == {
        f"{CANARY}-1",
        f"{CANARY}-2",
    }
