"""Clients that behave badly, and the books that must balance all the same."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import httpx
import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.reconciliation.checks import check_ledger
from gateway.db import create_engine
from gateway.home import Home
from gateway.processes import embedded_databases as embedded
from tests.stack import Stack


class Seen(msgspec.Struct):
    """The answer that one client got."""

    status: int = 0
    text: str = ""
    completion_tokens: int | None = None
    """From the usage it was told; None if it was never told."""
    error: dict[str, Any] | None = None
    done: bool = False


class Customer(msgspec.Struct, frozen=True):
    """An organization that a test has for itself, and its one key."""

    org_id: str
    key_id: str
    key: str


def new_customer(stack: Stack, *options: str) -> Customer:
    """Found one, as soon as the stack serves again. `options`: of its key."""
    stack.wait_ready()
    name = f"org-{time.monotonic_ns()}"
    org = json.loads(stack.run("orgs", "create", "--json", "--name", name))
    of_org = ("--name", name, "--org", name, *options)
    key = json.loads(stack.run("keys", "create", "--json", *of_org))
    return Customer(org_id=org["id"], key_id=key["id"], key=key["key"])


def client(stack: Stack, key: str | None = None) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=stack.base_url,
        headers={"authorization": f"Bearer {key or stack.credentials['api_key']}"},
        timeout=60,
        limits=httpx.Limits(max_connections=None),
    )


def body(words: str, *, max_tokens: int, stream: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model": "penny",
        "messages": [{"role": "user", "content": words}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": stream,
    }
    if stream:
        found["stream_options"] = {"include_usage": True}
    return found


async def read_stream(
    http: httpx.AsyncClient, words: str, *, max_tokens: int, leave_after: int | None = None
) -> Seen:
    """Stream; leave after so many chunks. A connection that is cut leaves `done` False."""
    seen, chunks = Seen(), 0
    request = body(words, max_tokens=max_tokens, stream=True)
    try:
        async with http.stream("POST", "/v1/chat/completions", json=request) as answer:
            seen.status = answer.status_code
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    seen.done = True
                    break
                note(seen, json.loads(line[6:]))
                chunks += 1
                if leave_after is not None and chunks >= leave_after:
                    break
    except httpx.TransportError as error:
        seen.error = {"transport": type(error).__name__}
    return seen


def note(seen: Seen, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        seen.error = chunk["error"]
        return
    for choice in chunk["choices"]:
        seen.text += choice["delta"].get("content") or ""
    if chunk.get("usage"):
        seen.completion_tokens = chunk["usage"]["completion_tokens"]


async def hang_up(http: httpx.AsyncClient, words: str, *, max_tokens: int, after_s: float) -> Seen:
    """A non-streaming request that is given up after a while."""
    request = body(words, max_tokens=max_tokens, stream=False)
    try:
        async with asyncio.timeout(after_s):
            answer = await http.post("/v1/chat/completions", json=request)
    except TimeoutError:
        return Seen()
    usage = answer.json()["usage"]
    return Seen(status=answer.status_code, completion_tokens=usage["completion_tokens"], done=True)


def words(rng: random.Random) -> str:
    return f"Tell me a story about {rng.randrange(10_000)} small bridges."


def wait_idle(stack: Stack) -> None:
    """Every block free, every reservation settled, every event in Postgres."""
    stack.wait_metric("tollgate_num_requests_running", 0, timeout_s=60)
    stack.wait_metric("tollgate_num_requests_waiting", 0)
    stack.wait_metric("tollgate_kv_cache_usage_perc", 0)
    stack.wait("leases are settled", lambda: stack.open_leases() == 0)
    stack.wait_metric("tollgate_spool_backlog_events", 0, timeout_s=60)


async def billed(stack: Stack, kind: str, org: str = "%") -> int:
    """Output tokens of all events of a kind."""
    ((total,),) = await stack.sql(
        "SELECT coalesce(sum(output), 0) FROM usage_events "
        f"WHERE kind = '{kind}' AND org LIKE '{org}'"
    )
    return int(total)


async def check_books(stack: Stack) -> None:
    """Debits equal credits, balances equal their entries, the rollup equals the events."""
    db: AsyncEngine = create_engine(embedded.postgres_url(Home(stack.home)))
    try:
        assert await check_ledger(db) == []
    finally:
        await db.dispose()
