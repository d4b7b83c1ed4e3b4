"""A tenant with batches in both shapes, a scripted replica, and runners that can be killed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.ingestion.shipper import notify_nobody
from billing.pricing.price_book import PriceBook
from billing.spool.spool import Spool
from billing.tables import usage_events
from foundation.tasks import TaskSet
from gateway.audit.log import COMMAND_LINE
from gateway.batches.batches import create_batch, get_batch
from gateway.batches.endpoints import LineEndpoint, ask_surface, in_anthropic_shape
from gateway.batches.runner import BatchRunner
from gateway.batches.sealing import opened
from gateway.batches.states import MESSAGES, shape_of
from gateway.batches.validation import InputBounds
from gateway.db import ROLE_SYSTEM, ROLE_TENANT, create_engine, tenant
from gateway.files.contents import PostgresContents
from gateway.files.files import MESSAGE_BATCH, get_file
from gateway.files.store import FileStore
from gateway.fleet.router import Fleet, Route
from gateway.generate_request import ChatPrompt, GenerateRequest
from gateway.generation_events import MeteredUsage, TextDelta
from gateway.inference.services import GenerationServices
from gateway.limits.limiter import Limiter
from gateway.request_log.writer import RequestLog
from gateway.secret import Cipher
from gateway.telemetry.metrics import Telemetry
from gateway.tenancy.tables import api_keys
from gateway.wire.shared.batch import Batch, Shape
from gateway.wire.surfaces import ApiSurface
from tests.gateway.a_secret import a_secret
from tests.gateway.office import AsListed, ScriptedReplica
from tests.gateway.whole_app import Tenant, make_tenant

MODEL, CHAT = "penny", "/v1/chat/completions"
SECRET = a_secret("now")
BOUNDS = InputBounds(max_lines=1000, max_file_bytes=2**20, max_line_bytes=2**16)
LEASE_S = 0.4


class WholeEncoder:
    def __init__(self, request: GenerateRequest, heading: object) -> None:
        self.text = ""

    def encode(self, items: Sequence[Any]) -> bytes:
        self.text += "".join(each.text for each in items if isinstance(each, TextDelta))
        return b""

    def finish(self, usage: MeteredUsage, cost: object = None) -> bytes:
        return msgspec.json.encode({"text": self.text, "output": usage.output})


def read(body: bytes, kind: object) -> GenerateRequest:
    prompt = ChatPrompt(messages=[])
    return GenerateRequest(model=MODEL, stream=False, include_usage=False, prompt=prompt)


SURFACE = ApiSurface(id_prefix="chatcmpl-", read=read, encoder=WholeEncoder)


class World:
    """A tenant with batches, and runners for them."""

    def __init__(self, db: AsyncEngine, owner: Tenant, key_id: str, **parts: Any) -> None:
        self.db, self.owner, self.key_id = db, owner, key_id
        self.services: GenerationServices = parts["services"]
        self.pools: list[AsyncEngine] = parts["pools"]
        self.files: FileStore = parts["files"]
        self.cipher = Cipher(SECRET, "batches")
        self.dropped: list[int] = []
        """How many rows of requests were lost, each time."""
        self.request_log = RequestLog(self.pools[1], keep_days=30, on_dropped=self.dropped.append)

    @property
    def where(self) -> dict[str, str]:
        return {"org_id": self.owner.org_id, "project_id": self.owner.project_id}

    def runner(self, **options: Any) -> BatchRunner:
        ask = partial(ask_surface, self.services, SURFACE)
        given: dict[str, Any] = {"max_running": 8, "lease_s": LEASE_S, "poll_s": 0.02, **options}
        return BatchRunner(
            services=self.services,
            telemetry=Telemetry(models=[MODEL]),
            db=self.pools[0],
            system_db=self.pools[1],
            files=self.files,
            cipher=self.cipher,
            bounds=BOUNDS,
            endpoints={
                CHAT: LineEndpoint(to_call=ask),
                MESSAGES: LineEndpoint(to_call=ask, encode=in_anthropic_shape),
            },
            on_booked=notify_nobody,
            request_log=self.request_log,
            **given,
        )

    async def batch(self, content: bytes | int, shape: Shape = "openai") -> Batch:
        """`content`: its file, or of how many lines."""
        if isinstance(content, int):
            to_line = a_line if shape == "openai" else a_request
            content = b"".join(to_line(number) for number in range(content))
        upload = await self.files.begin(**self.where, most_bytes=len(content))
        await upload.write(content)
        await upload.close()
        whose: dict[str, Any] = {**self.where, "key_id": self.key_id, "actor": COMMAND_LINE}
        async with tenant(self.db, self.owner.org_id) as conn:
            if shape == "openai":
                file = await upload.finish(conn, purpose="batch", filename="in.jsonl")
                whose["input_file_id"] = file.id
                return await create_batch(conn, self.cipher, **whose, endpoint=CHAT)
            file = await upload.finish(conn, purpose=MESSAGE_BATCH, filename="in.jsonl")
            whose["input_file_id"] = file.id
            number = content.count(b"\n")
            return await create_batch(
                conn, self.cipher, **whose, endpoint=MESSAGES, num_total=number
            )

    async def now(self, batch: Batch) -> Batch:
        shape = shape_of(batch.endpoint)
        async with tenant(self.db, self.owner.org_id) as conn:
            found = await get_batch(conn, **self.where, batch_id=batch.id, shape=shape)
        return opened(self.cipher, found)

    async def until(self, batch: Batch, *statuses: str) -> Batch:
        async with asyncio.timeout(30):
            while (found := await self.now(batch)).status not in statuses:
                await asyncio.sleep(0.02)
        return found

    async def results(self, file_id: str | None, shape: Shape = "openai") -> list[dict[str, Any]]:
        if file_id is None:
            return []
        async with tenant(self.db, self.owner.org_id) as conn:
            is_inner = shape == "anthropic"
            file = await get_file(conn, **self.where, file_id=file_id, is_inner=is_inner)
        content = b"".join([piece async for piece in self.files.read(file)])
        assert len(content) == file.size_bytes
        return [json.loads(line) for line in content.splitlines()]

    async def billed(self) -> list[Any]:
        async with self.db.connect() as conn:
            found = sa.select(usage_events).where(usage_events.c.kind == "usage")
            return list(await conn.execute(found))


def a_line(number: int, **changes: Any) -> bytes:
    line = {
        "custom_id": f"line-{number}",
        "method": "POST",
        "url": CHAT,
        "body": {"model": MODEL, "messages": []},
        **changes,
    }
    return json.dumps(line).encode() + b"\n"


def a_request(number: int) -> bytes:
    """The same in Anthropic's shape."""
    line = {"custom_id": f"line-{number}", "params": {"model": MODEL, "messages": []}}
    return json.dumps(line).encode() + b"\n"


@asynccontextmanager
async def open_world(
    db: AsyncEngine, postgres_url: str, redis: Redis, folder: Path, replica: ScriptedReplica
) -> AsyncIterator[World]:
    owner = await make_tenant(postgres_url, "acme", is_operator=True)
    pools = [create_engine(postgres_url, role=role) for role in (ROLE_TENANT, ROLE_SYSTEM)]
    spool, tasks, limiter = await Spool.open(folder / "spool"), TaskSet(), Limiter(redis)
    route = Route(model=MODEL, kind="engine", replicas=(replica,))
    services = GenerationServices(
        fleet=Fleet([route], rng=AsListed()),
        limiter=limiter,
        spool=spool,
        price_book=PriceBook.load(),
        tasks=tasks,
        cache_salts=lambda org: org,
        stalled_reader_s=60.0,
    )
    files = FileStore(
        db=pools[0],
        system_db=pools[1],
        contents=PostgresContents(pools[0], Cipher(SECRET, "files")),
        cipher=Cipher(SECRET, "files"),
        max_file_bytes=2**20,
        max_org_bytes=2**24,
    )
    async with db.connect() as conn:
        mine = sa.select(api_keys.c.id).where(api_keys.c.name == "first")
        key_id = str(await conn.scalar(mine))
    yield World(db, owner, key_id, services=services, pools=pools, files=files)
    await tasks.close()
    await limiter.close()
    await spool.shutdown()
    for pool in pools:
        await pool.dispose()
